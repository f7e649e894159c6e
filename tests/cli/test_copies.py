"""Test that `doctor` sees several installed copies of the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli import doctor
from mcore_ckpt_ext.cli.copies import installed_copies

OWN = Path(mcore_ckpt_ext.__file__).resolve().parent


def install(site: Path, version: str, editable_in: Path | None = None) -> Path:
    """Lay out an installation as pip does, and return the package's folder."""
    folder = (editable_in or site) / "mcore_ckpt_ext"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    metadata = site / f"mcore_ckpt_ext-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mcore_ckpt_ext\nVersion: {version}\n")
    if editable_in is not None:
        url = {"dir_info": {"editable": True}, "url": editable_in.as_uri()}
        (metadata / "direct_url.json").write_text(json.dumps(url))
    return folder


def test_the_running_copy_is_no_other_one() -> None:
    assert set(installed_copies("mcore_ckpt_ext")) == {OWN}
    assert not list(doctor._other_copies())


@pytest.mark.parametrize(
    ("version", "state"), [("0.1.0", "FAILED"), (mcore_ckpt_ext.__version__, "note")], ids=["another", "the same"]
)
@pytest.mark.parametrize("editable", [False, True], ids=["in a folder of packages", "editable"])
def test_another_copy_is_reported(
    version: str, state: str, editable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install(tmp_path / "site", version, tmp_path / "a clone" if editable else None)
    monkeypatch.syspath_prepend(tmp_path / "site")
    (line,) = doctor._other_copies()
    assert (line.what, line.state) == ("another copy", state)
    assert line.found == f"{version}, {folder}; keep one: pip uninstall mcore_ckpt_ext"


def test_a_clone_on_the_path_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mcore_ckpt_ext").mkdir()
    (tmp_path / "mcore_ckpt_ext" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = doctor._other_copies()
    assert (line.state, line.found.partition(",")[0]) == ("note", "of unknown version")
