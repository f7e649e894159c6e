"""The targets of fuzzing: every way in which untrusted bytes enter the package.

Each input ends in a value or a CheckpointError. A target takes its decisions from `Choices`, so that the
coverage-guided campaign and a plain random run share it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.auxiliary_files import auxiliary_files, configured_tokens, tokenizer_tokens
from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.storage.safe_pickle import safe_loads
from tests.fuzz import edits
from tests.fuzz.edits import Choices, Editor
from tests.harness.checkpoints import fixture_named, recorded_layout

CANONICAL, HUGGING_FACE, RECORDED = "canonical", "hf", "with a sidecar"
OPTIMIZERS = ("p41", "p42", "p43", "p44", "p45", "p46", "p47", "p47b", "p48")
# Of each target the files whose content is changed: fixture, file in the iteration folder, how.
SUBJECTS: dict[str, list[tuple[str, str, Callable[[bytes], Editor]]]] = {
    "index": [
        (seed, ".metadata", edits.pickled)
        for seed in ("p01", "p04", "p05", "p06", "p07", "p09", "p10", "p50", *OPTIMIZERS)
    ],
    "common": [(seed, "common.pt", edits.archived) for seed in ("p01", "p04", "p06", "p09", "p31")],
    "legacy": [
        ("p08c", "mp_rank_00/model_optim_rng.pt", edits.archived),
        ("p08b", "mp_rank_00_001/model_optim_rng.pt", edits.archived),
        ("p08b", "mp_rank_00_001/distrib_optim.pt", edits.archived),
    ],
    "archive": [
        ("p06", "common.pt", edits.raw),
        ("p06", "__0_0.distcp", edits.raw),
        ("p08c", "mp_rank_00/model_optim_rng.pt", edits.raw),
    ],
    "zarr": [
        ("p31", "output_layer.weight/.zarray", edits.text),
        ("p31", "decoder.layers.mlp.linear_fc1.weight/.zarray", edits.text),
        ("p33", "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight/.zarray", edits.text),
    ],
    "canonical": [
        (CANONICAL, "common.json", edits.text),
        (CANONICAL, "model.safetensors.index.json", edits.text),
        (CANONICAL, "canonical-00001-of-00001.safetensors", edits.headed),
    ],
    "config": [
        ("p01", "metadata.json", edits.text),
        (HUGGING_FACE, "config.json", edits.text),
        (HUGGING_FACE, "tokenizer.json", edits.text),
        (HUGGING_FACE, "model.safetensors", edits.headed),
    ],
    "sidecar": [(RECORDED, FILE_NAME, edits.text)],
}
TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<s>"}]}
PICKLE = "pickle"
NAMES = (PICKLE, *SUBJECTS)
_WHOLE = 16  # one input in so many has all its elements read; so has the first, and any that is run again
# Events of Python's audit hooks (PEP 578) that reading a checkpoint never raises.
_EXECUTION = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn", "subprocess.Popen",
    "socket.connect", "socket.bind", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree",
)  # fmt: skip


class Executed(BaseException):
    """The package did what only an attack asks for; no handler of the package may swallow this."""


def watch_execution() -> None:
    """Make every attempt to run, delete or connect something an error that nobody catches. It cannot be undone."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in _EXECUTION:
            raise Executed(f"{event}{arguments}")

    sys.addaudithook(hook)


def use(folder: Path, original: Path, whole: bool) -> None:
    """What the commands do with a checkpoint, short of writing; with `whole` they read every element."""
    configured_tokens(auxiliary_files(folder))
    tokenizer_tokens(auxiliary_files(folder))
    inspect(folder, buffers=True)
    verify(folder, quick=not whole)
    if whole:
        compare(folder, original)


@dataclass(frozen=True)
class Subject:
    """A file of a copy of a checkpoint; `edited` makes other contents for it."""

    checkpoint: Path
    original: Path
    file: str
    edited: Editor


class Target:
    """One target; its copies of checkpoints lie below `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self._subjects = [_subject(folder, *subject) for subject in SUBJECTS[name]]
        self._inputs = 0

    def run(self, choices: Choices) -> bool:
        """Whether an input was accepted; whatever is raised but a CheckpointError is a defect."""
        subject = self._subjects[choices.between(0, len(self._subjects) - 1)]
        path = subject.checkpoint / subject.file
        # By number, not by choice: an input that reads all elements reaches more code, so that most would do so.
        whole = self._inputs % _WHOLE == 0
        self._inputs += 1
        path.write_bytes(subject.edited(choices))
        try:
            use(subject.checkpoint, subject.original, whole)
        except CheckpointError:
            return False
        finally:
            path.write_bytes((subject.original / subject.file).read_bytes())
        return True


def _made(seed: str, folder: Path) -> None:
    """Make what is no fixture."""
    if seed == CANONICAL:
        mcore_ckpt_ext.convert(fixture_named("p01").run, folder, mcore_ckpt_ext.Canonical())
    elif seed == HUGGING_FACE:
        mcore_ckpt_ext.convert(fixture_named("p02").run, folder, mcore_ckpt_ext.HuggingFace(vocab_size=128))
        (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    else:
        fixture = fixture_named("p01")
        shutil.copytree(fixture.iteration, folder)
        (folder / FILE_NAME).write_text(recorded_layout(fixture).to_json())


def _subject(folder: Path, seed: str, file: str, editor: Callable[[bytes], Editor]) -> Subject:
    made = seed in (CANONICAL, HUGGING_FACE, RECORDED)
    original = folder / seed if made else fixture_named(seed).iteration
    if not original.exists():
        _made(seed, original)
    copy = folder / f"edited-{seed}"
    if not copy.exists():
        shutil.copytree(original, copy)
    return Subject(copy, original, file, editor((original / file).read_bytes()))


class PickleTarget:
    """The unpickler alone: many more inputs a second."""

    def __init__(self) -> None:
        self._editors = [
            edits.pickled(edits.pickle_of((fixture_named(seed).iteration / file).read_bytes()))
            for seed, file, _ in [*SUBJECTS["common"], *SUBJECTS["legacy"]]
        ]

    def run(self, choices: Choices) -> bool:
        """As `Target.run`."""
        data = bytearray(self._editors[choices.between(0, len(self._editors) - 1)](choices))
        for _ in range(choices.between(0, 3)):
            data[choices.between(0, len(data) - 1)] = choices.between(0, 255)
        try:
            safe_loads(bytes(data), "here")
        except CheckpointError:
            return False
        return True


def target(name: str, folder: Path) -> Target | PickleTarget:
    """The target of a name of `NAMES`."""
    return PickleTarget() if name == PICKLE else Target(name, folder)
