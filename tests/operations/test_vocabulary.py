"""Test the number of vocabulary rows: the stored rows decide, and no token's row is lost silently."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext import Canonical, HuggingFace, Legacy, TorchDist
from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.targets import Target
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import without_digests

# p02: 256 rows for TP2, a NullTokenizer of 127 tokens and the end of a document.
ROWS, TOKENS = 256, 128
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def canonical(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary") / "canonical"
    mcore_ckpt_ext.convert(fixture_named("p02").run, folder, Canonical())
    return folder


@pytest.fixture
def saying(canonical: Path, tmp_path: Path) -> Callable[..., Path]:
    """The same checkpoint, whose arguments say something else."""

    def made(**changes: Any) -> Path:
        folder = shutil.copytree(canonical, tmp_path / "source")
        about = json.loads((folder / "common.json").read_text())
        arguments = about["common"]["args"]["$namespace"]
        assert arguments.keys() >= changes.keys()
        arguments.update(changes)
        (without_digests(folder) / "common.json").write_text(json.dumps(about))
        return folder

    return made


def rows_of(run: Path) -> tuple[int, int | None]:
    """As they are stored, and as the arguments say."""
    checkpoint = mcore_ckpt_ext.open_checkpoint(run)
    return checkpoint.tensor("weight", EMBEDDING).shape[0], checkpoint.job.args["padded_vocab_size"]


@pytest.mark.parametrize("target", [TorchDist(), Legacy(), Legacy(tensor_model_parallel_size=1)], ids=repr)
@pytest.mark.parametrize("stated", [128, 512])
def test_the_stored_rows_decide(stated: int, target: Target, saying: Callable[..., Path], tmp_path: Path) -> None:
    told = f"the arguments say padded_vocab_size {stated}, but the vocabulary has {ROWS} rows"
    source = saying(padded_vocab_size=stated)
    report = mcore_ckpt_ext.convert(source, tmp_path / "out", target)
    assert any(told in note for note in report.notes)
    assert rows_of(tmp_path / "out") == (ROWS, ROWS)
    found = mcore_ckpt_ext.verify(source, quick=True)
    assert [finding.what for finding in found.findings if told in finding.what]
    assert told in str(mcore_ckpt_ext.inspect(source).model["vocabulary, padded"])


def test_where_they_agree_nothing_is_said(canonical: Path) -> None:
    """Negative control."""
    assert mcore_ckpt_ext.verify(canonical, quick=True).findings == ()
    assert mcore_ckpt_ext.inspect(canonical).model["vocabulary, padded"] == ROWS


@pytest.mark.parametrize("target", [Legacy, HuggingFace])
@pytest.mark.parametrize("asked", [1, TOKENS - 1])
def test_tokens_are_not_cut(asked: int, target: Callable[..., Target], canonical: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"lose tokens; found: --vocab-size {asked}; expected: {TOKENS} or more"):
        mcore_ckpt_ext.convert(canonical, tmp_path / "out", target(vocab_size=asked))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", [Legacy, HuggingFace])
@pytest.mark.parametrize("asked", [ROWS + 1, 999_999_999_999])
def test_tokens_are_not_invented(asked: int, target: Callable[..., Target], canonical: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"fewer rows than that.*--vocab-size {asked}; expected: {ROWS} or less"):
        mcore_ckpt_ext.convert(canonical, tmp_path / "out", target(vocab_size=asked))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", [Legacy, HuggingFace])
def test_rows_that_are_cut_are_called_rows(
    target: Callable[..., Target], saying: Callable[..., Path], tmp_path: Path
) -> None:
    """What stands in them is not known: without the arguments, the user alone says that they are no tokens."""
    source = saying(vocab_size=None)
    report = mcore_ckpt_ext.convert(source, tmp_path / "out", target(vocab_size=64, **packing_of(target)))
    (told,) = (note for note in report.notes if "are cut" in note)
    assert told.startswith(f"the last {128 if target is Legacy else 192} rows of the vocabulary are cut")
    assert not any("padding" in note for note in report.notes)


def packing_of(target: Callable[..., Target]) -> dict[str, int]:
    return {"tensor_model_parallel_size": 1} if target is Legacy else {}
