"""The real checkpoints of the tests: `fixture_named("p01")` extracts one and returns it.

They are archives in `tests/data`, which are extracted on first use, into a folder that is kept for the test run;
FOLDER_VARIABLE names it, so that the processes of one run share it.

    python -m tests.harness.checkpoints FOLDER...    packs folders into `tests/data`, reproducibly
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import pickle
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mcore_ckpt_ext import Canonical, Legacy, TorchDist
from mcore_ckpt_ext.formats.checkpoint import Checkpoint, open_checkpoint
from mcore_ckpt_ext.layout.sidecar import RecordedBucket, RecordedGroup, RecordedParameter, Sidecar
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.targets import Target
from mcore_ckpt_ext.transfer import read_slice
from mcore_ckpt_ext.versions import Version

FOLDER_VARIABLE = "TEST_DATA_UNPACKED"
_DATA = Path(__file__).parents[1] / "data"
_SUFFIX = ".tar.xz"
FIXTURES = sorted(path.name.removesuffix(_SUFFIX) for path in _DATA.glob(f"*{_SUFFIX}"))
# Optimizers other than Adam with all of its state in fp32, and writers other than Megatron-LM: tests name these.
APART = [name for name in FIXTURES if name[:2] in ("p4", "p5")]
# Written wrongly by Megatron itself.
CORRUPTED = [name for name in FIXTURES if "corrupt" in name]
# Those with all of Megatron's arguments, and the release that wrote them.
RELEASES = {
    "p07": Version(0, 7), "p06": Version(0, 8), "p05": Version(0, 12), "p01": Version(0, 16), "p10": Version(0, 19),
}  # fmt: skip
# Used in turn by tests of all checkpoints.
INTACT = [name for name in FIXTURES if name not in CORRUPTED and name not in APART]
# Optimizer formats that need a layout: flat gradient buffers.
FLAT = [name for name in INTACT if any(sign in name for sign in ("dpreshardable", "default", "dpzero", "bucketspace"))]
FLAT += [name for name in INTACT if any(sign in name for sign in ("moe", "torchadam", "te_", "legacy_tp"))]


@dataclass(frozen=True)
class Fixture:
    """A checkpoint written by real Megatron, with the state dumped from the live job."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "ckpt"

    @property
    def iteration(self) -> Path:
        return self.run / "iter_0000004"

    @cached_property
    def truth(self) -> dict[str, torch.Tensor]:
        """Model space: `kind.name` to tensor."""
        return load_file(self.folder / "truth.safetensors")

    @cached_property
    def job(self) -> dict[str, Any]:
        return json.loads((self.folder / "truth.json").read_text())

    def copy_to(self, target: Path) -> Fixture:
        """Copy the checkpoint for a test that damages it; the files of its iteration are writable."""
        shutil.copytree(self.folder, target)
        make_writable(target / "ckpt" / self.iteration.name)
        return Fixture(target)


def make_writable(folder: Path) -> None:
    """Allow changes of a folder and its files, as copies of fixtures are read-only."""
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)


def fixture_named(name: str) -> Fixture:
    """Return the fixture with this name or number: `p08` or `p08_v0161_legacy_tp2pp2dp2`."""
    (found,) = (known for known in FIXTURES if name in (known, known.partition("_")[0]))
    return Fixture(_unpacked(found))


@cache
def _unpacked(name: str) -> Path:
    """Return the folder of a fixture, which the first process extracts while the others wait."""
    folder = _shared_folder() / name
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
                with tarfile.open(_DATA / f"{name}{_SUFFIX}") as archive:
                    archive.extraction_filter = getattr(tarfile, "data_filter", None)  # 3.11.2 has none
                    archive.extractall(partial)
                (Path(partial) / name).rename(folder)
    return folder


@cache
def _shared_folder() -> Path:
    if FOLDER_VARIABLE not in os.environ:
        folder, owner = tempfile.mkdtemp(prefix="checkpoints-"), os.getpid()
        os.environ[FOLDER_VARIABLE] = folder

        def remove() -> None:
            if os.getpid() == owner:
                shutil.rmtree(folder)

        atexit.register(remove)
    return Path(os.environ[FOLDER_VARIABLE])


def optimizer_alone(name: str, folder: Path) -> Path:
    """Save the optimizer of a checkpoint without model and arguments, as loops do that store the model elsewhere."""
    shutil.copytree(fixture_named(name).iteration, folder)
    make_writable(folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    of_optimizers = ("optimizer.", "chained_", "common_state")
    for key in [key for key in metadata.state_dict_metadata if not key.startswith(of_optimizers)]:
        del metadata.state_dict_metadata[key]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    if (common := folder / "common.pt").exists():
        kept = torch.load(common, weights_only=False)
        torch.save({key: kept[key] for key in ("optimizer", "content_metadata") if key in kept}, common)
    return folder


def copied_by_torch(folder: Path) -> None:
    """Let the index of an iteration folder lack what no field of torch's class holds, as if torch 2.9 to 2.11 wrote it.

    Their `_FileSystemWriter.finish` (torch/distributed/checkpoint/filesystem.py) writes such a copy.
    """
    copied = replace(pickle.loads((folder / ".metadata").read_bytes()))
    copied.version = "1.0.0"  # a field since torch 2.9
    (folder / ".metadata").write_bytes(pickle.dumps(copied))


def pack(folder: Path, archive: Path) -> None:
    """Pack a folder into an archive that depends only on the names and the content of its files."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mode = 0o755 if member.isdir() else 0o644
        return member

    with tarfile.open(archive, "w:xz", preset=9, format=tarfile.GNU_FORMAT) as packed:
        for path in (folder, *sorted(folder.rglob("*"))):
            packed.add(path, str(path.relative_to(folder.parent)), recursive=False, filter=anonymous)


def part_of(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    """Return the elements of a slice of one tensor."""
    windows = [
        tensor[tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))].reshape(-1)
        for region in part.regions
    ]
    return torch.cat(windows)[part.start : part.stop]


def everything_in(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Read a whole checkpoint without Megatron: `kind.name` to tensor; masters are verified once."""
    found = {}
    for handle in (checkpoint.tensor(kind, name) for kind in checkpoint.kinds() for name in checkpoint.names(kind)):
        region = Region.whole(handle.logical.name, handle.shape)
        if handle.kind in (WEIGHT, FP32_PARAM):
            values = handle.read()
        else:
            values = read_slice(checkpoint, checkpoint.files.transfer, handle.kind, Slice.whole((region,)))
        found[f"{handle.kind}.{handle.logical.name}"] = values.view(handle.shape)
    return found


def assert_is_the_truth(checkpoint: Checkpoint, fixture: Fixture) -> None:
    """Check that a checkpoint equals the live state at the save of a fixture in every bit, dtypes included."""
    found, truth = everything_in(checkpoint), fixture.truth
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], truth[name]) for name in truth)
    assert all(found[name].dtype == truth[name].dtype for name in truth)


def assert_converted(run: Path, truth: Mapping[str, torch.Tensor], folder: Path, *, legacy: bool = True) -> None:
    """Convert a checkpoint to every format and back to torch_dist, and compare every bit with the live state.

    Args:
        run: the run folder.
        truth: the live state at the save.
        folder: where to write.
        legacy: whether legacy files can hold it.
    """
    targets: list[Target] = [TorchDist(megatron_version="0.16"), TorchDist(megatron_version="0.19"), Canonical()]
    targets += [Legacy(megatron_version="0.19")] * legacy
    for number, target in enumerate(targets):
        there, back = folder / f"{number} {target.name}", folder / f"{number} back"
        convert(run, there, target)
        convert(there, back, TorchDist(megatron_version="0.19"))
        for written in (there, back):
            found = everything_in(open_checkpoint(written))
            assert found.keys() == truth.keys(), f"{written}: {sorted(found.keys() ^ truth.keys())}"
            for key, expected in truth.items():
                assert torch.equal(found[key].view(torch.uint8), expected.contiguous().view(torch.uint8)), key
        assert compare(run, back).equal


def recorded_layout(fixture: Fixture) -> Sidecar:
    """Return the sidecar that the job would have written, from the reports of its ranks."""
    groups = []
    for rank in fixture.job["ranks"]:
        names = {(p["chunk"], p["local_name"]): p["canonical"][0] for p in rank["params"]}
        for child, optimizer in enumerate(rank["optimizers"]):
            if optimizer["dp_rank"] == 0:
                kind = "expert_parallel_buffers" if child else "buffers"
                buffers = [buffer for buffer in rank["buffers"] if buffer["kind"] == kind]
                buckets = [b for number, buffer in enumerate(buffers) for b in recorded_buckets(number, buffer, names)]
                groups.append(RecordedGroup(child, (optimizer["dp_group_idx"],), tuple(buckets)))
    written = open_checkpoint(fixture.iteration)
    return Sidecar("test", "0", written.job.iteration(), written.job.layout.sizes(), tuple(groups))


def recorded_buckets(
    number: int, buffer: dict[str, Any], names: dict[tuple[int, str], str]
) -> Iterator[RecordedBucket]:
    for bucket in buffer["buckets"]:
        parameters = tuple(
            RecordedParameter(
                names[buffer["chunk"], p["name"]], p["start"] - bucket["offset"], p["end"] - bucket["offset"]
            )
            for p in buffer["params_in_order"]
            if p["bucket"] == bucket["id"]
        )
        dtypes = f"({buffer['param_dtype']}, {buffer['grad_dtype']})"
        yield RecordedBucket(number, dtypes, bucket["id"], bucket["numel"], bucket["numel_unpadded"], parameters)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        source = Path(argument).resolve()
        pack(source, _DATA / f"{source.name}{_SUFFIX}")
