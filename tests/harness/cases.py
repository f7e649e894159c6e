"""Several loads in one launch of real Megatron-LM, and what each rank reports (see `ranks/`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.harness.jobs import RANK_SCRIPTS, run_job
from tests.harness.layouts import Layout
from tests.harness.rehearsals import assert_ends_alike


@dataclass(frozen=True)
class Case:
    """One load, with temporary changes of Megatron's arguments and the environment.

    Attributes:
        name: the key of its outcome.
        load: the run folder.
        arguments: other arguments to change after parsing.
        environment: variables to set.
        model: arguments of a model to build for this case.
        dump: where to dump the live optimizer afterwards.
    """

    name: str
    load: Path
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    dump: Path | None = None

    def order(self) -> dict[str, Any]:
        """Return the case in the form that the ranks read."""
        model = self.model.items()
        dump = {"dump": str(self.dump)} if self.dump else {}
        return {
            "name": self.name,
            "arguments": {"load": str(self.load), **self.arguments},
            "environment": dict(self.environment),
            "model": {name: str(value) if isinstance(value, torch.dtype) else value for name, value in model},
            **dump,
        }


Outcomes = dict[str, list[dict[str, Any]]]
"""For each case, by name, the reports of all ranks."""


def load_all(
    folder: Path, layout: Layout, cases: Sequence[Case], *, script: str = "load_cases.py", are_rehearsed: bool = False,
    **options: Any,
) -> Outcomes:  # fmt: skip
    """Build each model once and load the cases into it, in one launch; `options` are those of `run_job`.

    `are_rehearsed`: whether a rehearsal of each load must have the same outcome as the load.
    """
    folder.mkdir(parents=True, exist_ok=True)
    order, report = folder / "order.json", folder / "report"
    report.mkdir()
    order.write_text(json.dumps([case.order() for case in cases]))
    environment = {"TEST_ORDER": str(order), "TEST_REPORT": str(report)}
    result = run_job(folder, layout, script=RANK_SCRIPTS / script, environment=environment, **options)
    assert result.returncode == 0, result.output[-6000:]
    ranks = [json.loads((report / f"rank_{rank}.json").read_text()) for rank in range(layout.ranks)]
    outcomes = {case.name: [rank[case.name] for rank in ranks] for case in cases}
    for case in cases if are_rehearsed else ():
        first = outcomes[case.name][0]
        assert_ends_alike(case.load, first["arguments"], first["error"], case.environment)
    return outcomes


def save_noise(folder: Path, layout: Layout, more: Sequence[str] = (), **options: Any) -> Path:
    """Save a checkpoint of iteration 4 whose optimizer contains noise, and its dump, and return the run folder.

    `options`: those of `run_job`.
    """
    result = run_job(folder, layout, saves=True, script=RANK_SCRIPTS / "save_noise.py", more=more, **options)
    assert result.returncode == 0, result.output[-6000:]
    return folder / "checkpoints"
