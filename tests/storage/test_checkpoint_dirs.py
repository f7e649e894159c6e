"""Test run folders: the meaning of the tracker file, and which folders are iterations."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.megatron.probe import probe_checkpoint
from mcore_ckpt_ext.megatron.run_folder import folder_to_load
from mcore_ckpt_ext.megatron.saving.atomic_write import Disk
from mcore_ckpt_ext.operations.completeness import find_checkpoint
from mcore_ckpt_ext.operations.iteration_health import IterationHealth, iteration_health_of
from mcore_ckpt_ext.settings import FALLBACK, VERIFY_ALL
from mcore_ckpt_ext.storage.checkpoint_dirs import (
    NON_PERSISTENT,
    TRACKER_FILE,
    check_folder_exists,
    iteration_folder,
    iteration_folders,
    read_tracker,
)
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import payload_position

NAMES_NONE = {"empty": "", "words": "soon", "superscript": "²", "many digits": "1" * 5000, "negative": "-4"}


@pytest.mark.parametrize(
    ("text", "name"), [("4\n", "iter_0000004"), (" 12345678 ", "iter_12345678"), ("release", "release")]
)
def test_a_tracker_names_the_checkpoint(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / TRACKER_FILE).write_text(text)
    (tmp_path / name).mkdir()
    assert iteration_folder(tmp_path) == tmp_path / name


@pytest.mark.parametrize("text", NAMES_NONE.values(), ids=NAMES_NONE)
def test_a_tracker_that_names_nothing_is_reported_by_every_reader(tmp_path: Path, text: str) -> None:
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / TRACKER_FILE).write_text(text)
    with pytest.raises(UnreadableCheckpointError, match="names no iteration") as caught:
        iteration_folder(tmp_path)
    assert len(str(caught.value)) < 400
    (finding,) = find_checkpoint(tmp_path).findings
    assert "names no iteration" in finding.what
    health = iteration_health_of(tmp_path)
    assert health is not None
    assert "names no iteration" in health.problems[0]
    assert not Disk().is_tracked(tmp_path / "iter_0000004", tmp_path / TRACKER_FILE)


def test_no_tracker_is_not_a_tracker_that_names_nothing(tmp_path: Path) -> None:
    assert read_tracker(tmp_path / TRACKER_FILE) is None
    assert iteration_folder(tmp_path) == tmp_path
    assert iteration_health_of(tmp_path / "missing") is None


def test_iterations_are_listed_newest_first(tmp_path: Path) -> None:
    for name in ("iter_0000004", "iter_0000010", "iter_12345678", "iter_4", "iter_000000²", "release"):
        (tmp_path / name).mkdir()
    assert list(iteration_folders(tmp_path)) == [12345678, 10, 4]


@pytest.mark.parametrize("name", ["p02", "p08", "p31", "p42", "p50", "p51"])
def test_a_damaged_checkpoint_of_every_format_has_an_older_one_of_another(name: str, tmp_path: Path) -> None:
    newest, older = fixture_named(name).copy_to(tmp_path / "run"), fixture_named("p50" if name == "p42" else "p42")
    assert iteration_health_of(newest.run) == IterationHealth("iteration 4", (), None, ())
    shutil.copytree(older.iteration, newest.run / "iter_0000002")
    files = [path for path in newest.iteration.rglob("*") if path.is_file()]
    max(files, key=lambda path: path.stat().st_size).unlink()
    health = iteration_health_of(newest.run)
    assert health is not None
    assert health.problems
    assert health.newest_complete == 2


def test_damage_that_only_a_full_check_finds_is_not_complete_by_a_full_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros in a moment leave every file as long as it was, and no master contradicts them."""
    run = fixture_named("p42").copy_to(tmp_path / "run").run
    shutil.copytree(run / "iter_0000004", run / "iter_0000002")
    checkpoint = open_checkpoint(run)
    file, position = payload_position(checkpoint, "exp_avg", checkpoint.names("exp_avg")[0], 0)
    with file.open("r+b") as stored:
        stored.seek(position)
        stored.write(bytes(64))
    arguments = Namespace(ckpt_step=None, load=str(run))

    def health() -> IterationHealth:
        found = probe_checkpoint(arguments, "load", str(run), shares_index=False).health
        assert found is not None
        return found

    monkeypatch.setenv(FALLBACK.name, "1")
    assert health().problems == ()
    monkeypatch.setenv(VERIFY_ALL.name, "full")
    assert "checksum" in health().problems[0]
    assert health().newest_complete == 2
    monkeypatch.setenv(FALLBACK.name, "0")  # then each rank reads its share
    assert health().problems == ()


@pytest.mark.parametrize(("persistent", "other", "is_taken"), [("4", "6", True), ("6", "6", True), ("8", "6", False)])
def test_one_rule_says_which_checkpoint_is_the_newest(
    persistent: str, other: str, is_taken: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job with `--non-persistent-ckpt-type global` and the commands, which name the checkpoint that it takes."""
    run = fixture_named("p42").copy_to(tmp_path / "run").run
    (run / "iter_0000004").rename(run / f"iter_000000{persistent}")
    newer = run / NON_PERSISTENT / f"iter_000000{other}"
    newer.mkdir(parents=True)
    (run / TRACKER_FILE).write_text(persistent)
    (newer.parent / TRACKER_FILE).write_text(other)
    job = Namespace(non_persistent_ckpt_type="global", ckpt_format="torch_dist")
    assert folder_to_load(str(run), job) == (newer if is_taken else run / f"iter_000000{persistent}")
    assert folder_to_load(str(run), Namespace(non_persistent_ckpt_type=None)) == run / f"iter_000000{persistent}"
    main(["inspect", str(run)])
    assert (str(newer) in capsys.readouterr().err) == is_taken
    main(["diff", str(run / f"iter_000000{persistent}"), str(run), "--kinds", "weight"])
    assert (str(newer) in capsys.readouterr().err) == is_taken
    main(["inspect", str(run / f"iter_000000{persistent}")])
    assert str(newer) not in capsys.readouterr().err


def test_a_file_is_distinguished_from_nothing(tmp_path: Path) -> None:
    check_folder_exists(tmp_path)
    with pytest.raises(UnreadableCheckpointError, match="there is no such folder"):
        check_folder_exists(tmp_path / "file")
    (tmp_path / "file").touch()
    with pytest.raises(UnreadableCheckpointError, match="that is a file, not a folder"):
        check_folder_exists(tmp_path / "file")


@pytest.mark.parametrize("name", [
    "zero_to_fp32.py", "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt", "layer_01-model_00-model_states.pt",
    "global_step5/mp_rank_00_model_states.pt",
])  # fmt: skip
def test_a_folder_of_deepspeed_is_recognized_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "latest").write_text("global_step5")
    with pytest.raises(UnreadableCheckpointError, match="DeepSpeed wrote this folder.*zero_to_fp32.py"):
        open_checkpoint(tmp_path)
