"""Test a corpus of attacks on readers of checkpoints: each is refused by name, in little time and memory."""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsafePickleError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.storage import safe_pickle
from mcore_ckpt_ext.storage.budget import OverBudgetError
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.pickling import dumps
from mcore_ckpt_ext.storage.safe_pickle import safe_loads
from mcore_ckpt_ext.storage.torch_archive import TorchArchive
from tests.fuzz import campaign, edits, targets
from tests.harness.checkpoints import Fixture

REPOSITORY = Path(__file__).parents[2]
MOST_GROWTH = 256 << 20

ENDLESS = {
    "a memo index of a billion": b"\x80\x02]r\x00\xca\x9a\x3b.",
    "the same in text": b"]p200000000\n.",
    "a negative memo index": b"]p-2\n.",
    "zeros by number": b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "a list of a range": b"\x80\x02cbuiltins\nlist\ncbuiltins\nrange\nJ\xff\xff\xff\x7f\x85R\x85R.",
    "a size of a range": b"\x80\x02ctorch\nSize\ncbuiltins\nrange\nJ\xff\xff\xff\x7f\x85R\x85R.",
    "a string that is not there": b"\x80\x02X\xff\xff\xff\x7fa.",
    "a frame that is not there": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
}


@pytest.mark.parametrize("attack", ENDLESS)
def test_a_few_bytes_that_ask_for_gigabytes_are_refused(attack: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        UnsafePickleError, match="(damaged.*hint: use another copy|no checkpoint needs.*hint: do not use)"
    ):
        safe_loads(ENDLESS[attack], "here")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_GROWTH


def laughing(levels: int) -> object:
    tree: object = ["ha"]
    for _ in range(levels):
        tree = [tree, tree]
    return tree


def containing_itself() -> object:
    tree: list[object] = []
    tree.append({"again": tree})
    return tree


def nested(levels: int) -> object:
    tree: object = ()
    for _ in range(levels):
        tree = (tree,)
    return tree


@pytest.mark.parametrize(
    "tree", [laughing(60), containing_itself(), nested(400), {"args": argparse.Namespace(a=laughing(40))}],
    ids=["laughing", "circular", "deep", "below"],
)  # fmt: skip
def test_a_state_without_end_is_refused(tree: object, tmp_path: Path) -> None:
    write_archive(tmp_path / "state.pt", pickle.dumps(tree, 2))
    refused = (UnsafePickleError, OverBudgetError)
    with (
        FolderReader(tmp_path) as reader,
        pytest.raises(refused, match="refers to itself or is nested too deeply|far more work"),
    ):
        TorchArchive(reader, "state.pt").load()


def test_a_state_that_refers_twice_to_the_same_is_read(tmp_path: Path) -> None:
    """Negative control: sharing alone is no attack."""
    write_archive(tmp_path / "state.pt", pickle.dumps(laughing(10), 2))
    with FolderReader(tmp_path) as reader:
        assert TorchArchive(reader, "state.pt").load() == laughing(10)


def write_archive(path: Path, data: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)


@pytest.mark.parametrize(
    "named", ["argparse\nNamespace", "torch\nFloatStorage", "torch._utils\n_rebuild_tensor_v2", "megatron\nThing",
              "torch.distributed.checkpoint.metadata\nMetadata"],
)  # fmt: skip
@pytest.mark.parametrize("state", [b"}X\x05\x00\x00\x00dtypeK\x07s", b"(N}X\x05\x00\x00\x00dtypeK\x07st"])
def test_a_pickle_cannot_change_what_later_pickles_find(named: str, state: bytes) -> None:
    """BUILD sets attributes of whatever lies on the stack, and what is found by name stays for good."""
    lookup = b"\x80\x02c" + named.encode() + b"\n"
    with contextlib.suppress(UnsafePickleError):
        safe_loads(lookup + state + b"b.", "here")
    assert getattr(safe_loads(lookup + b".", "here"), "dtype", None) != 7


FOUND_BY_NAME = sorted(f"{module}\n{name}" for module, name in safe_pickle._REAL)


@pytest.mark.parametrize("attribute", ["__qualname__", "__name__", "__doc__", "__defaults__", "__dict__", "new"])
def test_nor_what_it_finds_for_good(attribute: str) -> None:
    """All that is there for every pickle; some attributes of a class are no part of its `__dict__`."""
    value: object = {"defaults": (1,), "dict": {}}.get(attribute.strip("_"), "evil")
    state = b"N" + pickle.dumps({attribute: value}, 2)[2:-1] + b"\x86"
    for named in FOUND_BY_NAME:
        with pytest.raises(UnsafePickleError):
            safe_loads(b"\x80\x02c" + named.encode() + b"\n" + state + b"b.", "here")
    assert pickle.loads(pickle.dumps(argparse.Namespace(size=3))) == argparse.Namespace(size=3)


def test_the_namespace_would_stay_changed_elsewhere() -> None:
    """Negative control, in a process of its own."""
    code = (
        "import argparse, pickle;"
        "pickle.loads(b'\\x80\\x02cargparse\\nNamespace\\n(N}X\\x0c\\0\\0\\0__qualname__X\\x04\\0\\0\\0evilstb.');"
        "pickle.dumps(argparse.Namespace())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Can't pickle <class 'argparse.evil'>" in done.stderr


class Constant:
    """Decisions that always fall the same way."""

    def __init__(self, values: list[int]) -> None:
        self._values = values

    def between(self, low: int, high: int) -> int:
        return min(max(self._values.pop(0) if self._values else low, low), high)


def pickled_tensor(shape: object, strides: object, offset: int) -> bytes:
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQ"
    numbers = b"".join(pickle.dumps(value, 2)[2:-1] for value in (offset, shape, strides))
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numbers + b"tR."


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [((-1,), (1,), 0), ((1 << 40, 1 << 40), (1, 1), 0), ((2,), (1, 1), 0), ((2,), (1,), -8), ((2.0,), (1,), 0)],
)
def test_a_tensor_that_cannot_be_is_refused(shape: object, strides: object, offset: int) -> None:
    assert safe_loads(pickled_tensor((2,), (1,), 0), "here").shape == (2,)
    with pytest.raises(UnsafePickleError, match="damaged.*a tensor of shape"):
        safe_loads(pickled_tensor(shape, strides, offset), "here")


@pytest.mark.parametrize(
    "arguments",
    [{"tensor_model_parallel_size": -1}, {"pipeline_model_parallel_size": 1 << 40}, {"world_size": 1 << 40},
     {"tensor_model_parallel_size": 1 << 10, "pipeline_model_parallel_size": 1 << 10}],
)  # fmt: skip
def test_a_layout_that_cannot_be_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(UnreadableCheckpointError, match="impossible|invalid value"):
        ParallelLayout.from_arguments(JobArguments.of(arguments))


def outside(entry: object) -> None:
    entry.size = tuple(size // 2 for size in entry.size)  # type: ignore[attr-defined]


def larger_than_its_record(entry: object) -> None:
    entry.size = tuple(size << 20 for size in entry.size)  # type: ignore[attr-defined]
    entry.chunks[0].sizes = entry.size  # type: ignore[attr-defined]


def repeated(entry: object) -> None:
    entry.chunks *= 1 << 16  # type: ignore[attr-defined]


def another_rank(entry: object) -> None:
    entry.size = (*entry.size, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [outside, larger_than_its_record, repeated, another_rank])
def test_an_index_that_contradicts_itself_is_refused(change: Callable[[object], None], damaged: Fixture) -> None:
    path = damaged.iteration / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # torch's own classes: a file of these tests
    change(metadata.state_dict_metadata["decoder.final_layernorm.weight"])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnreadableCheckpointError, match="index is damaged"):
        open_checkpoint(damaged.run)


def test_metadata_that_make_no_sense_are_one_clear_error(damaged: Fixture) -> None:
    """A type that nobody expects, deep in the common state: a refusal, and a finding of `verify`."""
    path = damaged.iteration / "common.pt"
    common = safe_loads(edits.pickle_of(path.read_bytes()), "here")
    common["args"] = ["four"]
    data, leaves = dumps(common)
    assert not leaves
    write_archive(path, data)
    with pytest.raises(UnreadableCheckpointError, match="invalid metadata.*TypeError.*hint"):
        inspect(damaged.run)
    found = verify(damaged.run, quick=True)
    assert any("invalid metadata" in finding.what for finding in found.findings)


@pytest.mark.thorough
def test_the_watch_sees_an_execution() -> None:
    """Negative control of the campaign: what it forbids, it notices."""
    code = "import os; from tests.fuzz import targets; targets.watch_execution(); os.system('true')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode and "Executed: os.system" in done.stderr


def test_a_target_lets_defects_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the campaign: an exception that is no refusal ends it."""

    def defect(data: bytes, where: str) -> object:
        raise KeyError("a defect")

    monkeypatch.setattr(targets, "safe_loads", defect)
    with pytest.raises(KeyError):
        targets.PickleTarget().run(Constant([0]))


@pytest.mark.nightly
@pytest.mark.thorough
def test_a_bounded_campaign_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.campaign", "--inputs", "200", "--only", "pickle"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("name", campaign.SHARES)
def test_a_few_inputs_by_chance_find_nothing(name: str, tmp_path: Path) -> None:
    target = targets.target(name, tmp_path)
    for seed in range(10):
        target.run(edits.ByChance(seed))
