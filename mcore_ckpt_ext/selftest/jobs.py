"""The self-test's training jobs as data: their command lines, and the order file that the ranks read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.layout.parallel import ParallelLayout

SAVED = 3
LAST = 6
"""The iteration of the checkpoint, and the last iteration: three losses are compared."""


def layout_of(
    ranks: int, tensor: int = 1, pipeline: int = 1, expert: int = 1, virtual: int = 1, expert_tensor: int | None = None
) -> ParallelLayout:
    """Return the layout of a job of the self-test from its sizes.

    Without `expert_tensor`, experts are divided as the rest.
    """
    data = ranks // (tensor * pipeline)
    return ParallelLayout(tensor, pipeline, virtual, expert, expert_tensor or tensor, context=1, data=data, world=ranks)


@dataclass(frozen=True)
class Job:
    """One training job, which saves a checkpoint or resumes one.

    Attributes:
        name: unique; its folders are named after it.
        format: optimizer format of its checkpoint.
        check: what it tests.
        arguments: Megatron's command line, without paths.
        environment: environment variables to set for it.
        loads: name of the job whose checkpoint it resumes; None to train from the start and save.
        expects: part of a log line by which this package reports that it did what is tested.
        skipped: why it is not run; empty if it is.
    """

    name: str
    model: str
    format: str
    layout: ParallelLayout
    check: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    loads: str | None = None
    expects: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Machine:
    """The resources of the self-test.

    Attributes:
        no_engine: why Transformer Engine's layers are unavailable; empty if they are available.
        no_fp8: why fp8 is unavailable; empty if it is available.
        no_blockwise: why fp8 with a scale for each block is unavailable; empty if it is available.
        layers: number of layers of a model, which is the largest possible number of pipeline stages.
    """

    ranks: int
    backend: str = "nccl"
    no_engine: str = ""
    no_fp8: str = ""
    no_blockwise: str = ""
    layers: int = 8


@dataclass(frozen=True)
class Order:
    """The work of the ranks: jobs, to be run one after the other, and the folder for all output."""

    folder: Path
    jobs: tuple[Job, ...]

    def write(self) -> Path:
        """Write the order into its folder, and return the file."""
        path = self.folder / "order.json"
        path.write_text(
            json.dumps([asdict(job) | {"layout": job.layout.sizes()} for job in self.jobs]), encoding="utf-8"
        )
        return path

    @classmethod
    def read(cls, path: Path) -> Order:
        """Read an order from its file."""
        return cls(path.parent, tuple(map(_job, json.loads(path.read_text(encoding="utf-8")))))

    @property
    def results(self) -> Path:
        """The file to which the first rank appends one line for each finished job."""
        return self.folder / "results.jsonl"

    def checkpoints(self, name: str) -> Path:
        """Return the run folder of a job."""
        return self.folder / "checkpoints" / name

    def state(self, name: str) -> Path:
        """Return the folder for the live state of a job's ranks."""
        return self.folder / "state" / name

    def losses(self, name: str) -> Path:
        """Return the file with the losses of a job, by iteration."""
        return self.folder / "losses" / f"{name}.json"

    def failure(self, name: str, rank: int) -> Path:
        """Return the file in which a rank reports why a job failed."""
        return self.folder / "failures" / f"{name}.{rank:05d}.txt"


def _job(fields: Mapping[str, Any]) -> Job:
    return Job(**{**fields, "layout": ParallelLayout(**fields["layout"]), "arguments": tuple(fields["arguments"])})


@dataclass(frozen=True)
class JobResult:
    """The result of a finished job.

    Attributes:
        setup_seconds: duration of setting up model and optimizer and loading the checkpoint.
        elements: number of elements of weights and optimizer state in the state that was compared or saved.
        differences: differences from the state at the save; empty if there are none.
        losses: losses of the iterations after the checkpoint.
        messages: log lines of this package on the first rank.
    """

    name: str
    seconds: float
    setup_seconds: float
    elements: int
    differences: Sequence[str]
    losses: Mapping[str, float]
    messages: Sequence[str]


def read_results(path: Path) -> dict[str, JobResult]:
    """Read the results so far, by name of the job, ignoring an incomplete line."""
    if not path.exists():
        return {}
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    results = [JobResult(**json.loads(line)) for line in lines]
    return {result.name: result for result in results}
