"""Test what a conversion never overwrites: its source, other files next to it, folders of other users or programs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import DestinationError
from mcore_ckpt_ext.storage import folder as folders
from mcore_ckpt_ext.storage.publish import Publication
from mcore_ckpt_ext.targets import TARGETS
from tests.harness.checkpoints import Fixture, fixture_named


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Fixture:
    """A run folder that may be lost, in a folder of its own."""
    (tmp_path / "work").mkdir()
    return fixture_named("p02").copy_to(tmp_path / "work" / "p02")


def through_a_link(run: Path) -> tuple[str, str]:
    run.with_name("link").symlink_to(run)
    return "link", str(run)


ALIASES: dict[str, Callable[[Path], tuple[str, str]]] = {
    "both relative": lambda run: ("ckpt", "ckpt"),
    "a relative source": lambda run: ("ckpt", str(run)),
    "the source through a link": through_a_link,
    "the destination with ..": lambda run: ("ckpt", "ckpt/iter_0000004/../../ckpt"),
    "a file:// source": lambda run: (f"file://{run}", str(run)),
    "a file:// destination": lambda run: (str(run), f"file://{run}"),
    "this folder": lambda run: ("ckpt", "."),
    "the folder above": lambda run: (str(run / "iter_0000004"), "ckpt"),
    "the iteration": lambda run: ("ckpt", "ckpt/iter_0000004"),
    "below the run": lambda run: ("ckpt", "ckpt/new"),
    "below the iteration": lambda run: ("ckpt/iter_0000004", "ckpt/iter_0000004/new/out"),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_the_source_is_never_replaced_or_written_into(
    alias: str, source: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.folder)
    given, destination = ALIASES[alias](source.run)
    before = content(source.folder.parent)
    with pytest.raises(DestinationError, match="inside the source"):
        mcore_ckpt_ext.convert(given, destination, mcore_ckpt_ext.TorchDist(), force=True)
    assert content(source.folder.parent) == before


def test_the_destination_is_a_path(source: Fixture) -> None:
    with pytest.raises(DestinationError, match="invalid name for a folder"):
        mcore_ckpt_ext.convert(source.run, f"{source.folder}/a\0b", mcore_ckpt_ext.Canonical())


def test_the_destination_is_no_link(source: Fixture) -> None:
    (source.folder / "out").symlink_to(source.folder / "elsewhere")
    with pytest.raises(DestinationError, match=r"symbolic link.*elsewhere"):
        mcore_ckpt_ext.convert(source.run, source.folder / "out", mcore_ckpt_ext.TorchDist())


def strangers(path: Path) -> None:
    (path / "thesis").mkdir(parents=True)
    (path / "thesis" / "chapter.tex").write_text("a year's work")


def a_plain_file(path: Path) -> None:
    path.write_text("a year's work")


def a_downloaded_model(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def a_run_with_logs(path: Path) -> None:
    shutil.copytree(fixture_named("p02").run, path)
    (path / "tensorboard").mkdir()
    (path / "tensorboard" / "events.out.tfevents").write_text("a year's work")


def a_run_with_results(path: Path) -> None:
    shutil.copytree(fixture_named("p02").run, path)
    (path / "iter_0000004" / "evaluation.json").write_text("a year's work")


def an_interrupted_save(path: Path) -> None:
    shutil.copytree(fixture_named("p02").run, path)
    (path / "iter_0000004" / "metadata.json").unlink()


@pytest.mark.parametrize(
    "what",
    [strangers, a_plain_file, a_downloaded_model, a_run_with_logs, a_run_with_results, an_interrupted_save],
    ids=lambda what: what.__name__,
)
def test_force_replaces_nothing_but_checkpoints(what: Callable[[Path], None], tmp_path: Path) -> None:
    what(tmp_path / "out")
    before = content(tmp_path)
    with pytest.raises(DestinationError, match=r"not replaced|would be lost"):
        mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "out", mcore_ckpt_ext.TorchDist(), force=True)
    assert content(tmp_path) == before


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "options"),
    [
        ("torch_dist", {}),
        ("torch_dist", {"loop": "bridge"}),
        ("legacy", {}),
        ("canonical", {}),
        ("fsdp_dtensor", {}),
        ("hf", {}),
        ("hf", {"pickled": True}),
    ],
    ids=str,
)
def test_force_replaces_what_this_tool_wrote(first: str, options: dict[str, bool | str], tmp_path: Path) -> None:
    run = fixture_named("p02").run
    mcore_ckpt_ext.convert(run, tmp_path / "out", TARGETS[first](**options))
    then = "torch_dist" if first == "legacy" else first
    mcore_ckpt_ext.convert(run, tmp_path / "out", TARGETS[then](), force=True)
    mcore_ckpt_ext.convert(run, tmp_path / "fresh", TARGETS[then]())
    assert content(tmp_path / "out") == content(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"]


@pytest.mark.thorough
@pytest.mark.parametrize("prefix", ["p02", "p08", "p31"])
def test_force_replaces_what_megatron_wrote(prefix: str, tmp_path: Path) -> None:
    shutil.copytree(fixture_named(prefix).run, tmp_path / "out")
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "out", mcore_ckpt_ext.TorchDist(), force=True)
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "fresh", mcore_ckpt_ext.TorchDist())
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


@pytest.fixture(params=["renameat2", "without it"])
def renaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what Linux offers, and on a file system that does not offer it."""
    if request.param == "without it":

        def refuse(*given: object) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(folders, "_rename", refuse)
    elif not sys.platform.startswith("linux"):
        pytest.skip("renameat2 is Linux's")


@pytest.mark.thorough
@pytest.mark.usefixtures("renaming")
@pytest.mark.parametrize("force", [False, True])
def test_a_destination_that_appears_during_the_conversion_is_kept(force: bool, tmp_path: Path) -> None:
    """Another conversion's finished output, for example; and what was written is kept for --resume."""
    run, out = fixture_named("p02").run, tmp_path / "out"

    def appear(done: int, total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "result").write_text("of another")

    with pytest.raises(DestinationError, match=r"created by something else.*--resume"):
        mcore_ckpt_ext.convert(run, out, mcore_ckpt_ext.Canonical(), force=force, progress=appear)
    assert content(out) == {"result": b"of another"}
    shutil.rmtree(out)
    steps: list[int] = []
    mcore_ckpt_ext.convert(
        run, out, mcore_ckpt_ext.Canonical(), resume=True, progress=lambda done, total: steps.append(done)
    )
    assert not steps
    mcore_ckpt_ext.convert(run, tmp_path / "fresh", mcore_ckpt_ext.Canonical())
    assert content(out) == content(tmp_path / "fresh")


@pytest.mark.thorough
@pytest.mark.usefixtures("renaming")
@pytest.mark.parametrize("what", ["a file in it", "another in its place"])
def test_a_destination_that_changed_is_not_replaced(what: str, tmp_path: Path) -> None:
    run, out = fixture_named("p02").run, tmp_path / "out"
    mcore_ckpt_ext.convert(run, out, mcore_ckpt_ext.Canonical())

    def change(done: int, total: int) -> None:
        if what == "another in its place" and not (tmp_path / "moved").exists():
            out.rename(tmp_path / "moved")
            out.mkdir()
        (out / "result").write_text("a year's work")

    with pytest.raises(DestinationError, match=r"would be lost|another folder took"):
        mcore_ckpt_ext.convert(run, out, mcore_ckpt_ext.TorchDist(), force=True, progress=change)
    assert (out / "result").read_text() == "a year's work"


@pytest.mark.usefixtures("renaming")
def test_the_old_one_is_there_until_the_new_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = fixture_named("p02").run, tmp_path / "out"
    mcore_ckpt_ext.convert(run, out, mcore_ckpt_ext.Canonical())
    before = content(out)
    seen: list[dict[str, bytes]] = []
    monkeypatch.setattr(Publication, "publish", lambda self: (seen.append(content(out)), 1 / 0)[1])
    with pytest.raises(ZeroDivisionError):
        mcore_ckpt_ext.convert(run, out, mcore_ckpt_ext.TorchDist(), force=True)
    assert seen == [before]
    assert content(out) == before


@pytest.mark.thorough
def test_a_run_killed_between_two_renames_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names cannot be exchanged, the old folder lies aside for a moment; the next run finds it there."""
    run, out = fixture_named("p02").run, tmp_path / "out"
    mcore_ckpt_ext.convert(run, out, mcore_ckpt_ext.Canonical())
    before = content(out)
    program = (
        "import errno, os, sys, mcore_ckpt_ext\n"
        "from mcore_ckpt_ext.storage import folder\n"
        "def refuse(*given): raise OSError(errno.EINVAL, 'no')\n"
        "folder._rename = refuse\n"
        "rename = os.rename\n"
        "def killed(*given, **more): rename(*given, **more); os._exit(9)\n"
        "os.rename = killed\n"
        f"mcore_ckpt_ext.convert({str(run)!r}, {str(out)!r}, mcore_ckpt_ext.TorchDist(), force=True)\n"
    )
    assert os.waitstatus_to_exitcode(os.system(f'{sys.executable} -c "{program}"')) == 9
    assert not out.exists()
    with pytest.raises(DestinationError, match="exists already"):
        mcore_ckpt_ext.convert(run, out, mcore_ckpt_ext.TorchDist())
    assert content(out) == before


@pytest.mark.parametrize("options", ["a" * 16, "b" * 16], ids=["the same", "others"])
def test_one_conversion_at_a_time_whatever_its_options(options: str, tmp_path: Path) -> None:
    """The lock belongs to the destination, not to the work."""
    first, second = (Publication(tmp_path / "out", fingerprint) for fingerprint in ("a" * 16, options))
    first.open()
    with pytest.raises(DestinationError, match="another process"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_unfinished_work_is_continued_only_by_the_same_work(tmp_path: Path) -> None:
    first, second = (Publication(tmp_path / "out", fingerprint) for fingerprint in ("a" * 16, "b" * 16))
    first.open()
    first.close()
    (first.folder / "file").write_bytes(b"hours")
    with pytest.raises(DestinationError, match="other options.*to discard it and start again, leave --resume out"):
        second.open(resume=True)
    second.close()
    assert (first.folder / "file").read_bytes() == b"hours"
    second.open()
    assert not list(second.folder.iterdir())
    second.close()


def test_the_replaced_folder_is_never_taken_for_unfinished_work(tmp_path: Path) -> None:
    """Killed right after the names were exchanged: what is called content is the old checkpoint."""
    run, out = fixture_named("p02").run, tmp_path / "out"
    mcore_ckpt_ext.convert(run, out, mcore_ckpt_ext.Canonical())
    unfinished = Publication(out, "a" * 16)
    unfinished.open(force=True)
    (tmp_path / "new").mkdir()
    unfinished.folder.rename(tmp_path / "made")
    out.rename(unfinished.folder)
    (tmp_path / "made").rename(out)
    unfinished.close()
    again = Publication(out, "a" * 16)
    again.open(force=True, resume=True)
    assert not list(again.folder.iterdir())
    again.close()
