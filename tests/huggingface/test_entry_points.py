"""Tests model families that other distributions register: conversion, messages, and late loading."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.entry_points import registered_families
from mcore_ckpt_ext.families.family import Family
from tests.harness.huggingface import assert_same_tensors
from tests.harness.registered_families import distribution_with_family, parrot_model

MEMBERS = sorted(name for name in {*dir(Family), *Family.__annotations__} if not name.startswith("_"))
MODULES = ("parrot_families", "broken_families", "rival_families")


@dataclass(frozen=True)
class Outcome:
    returncode: int
    stdout: str
    stderr: str


class CommandLine(Protocol):
    def __call__(self, *words: object, path: Path) -> Outcome: ...


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> CommandLine:
    """Return the command line of a process with the distributions in `path`."""

    def command(*words: object, path: Path) -> Outcome:
        caplog.clear()
        registered_families.cache_clear()
        for module in MODULES:
            sys.modules.pop(module, None)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(path)
            try:
                code = main(list(map(str, words)))
            except SystemExit as ended:
                code = int(ended.code or 0)
        shown = capsys.readouterr()
        return Outcome(code, shown.out, shown.err + caplog.text)

    return command


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Remove registered families after each test."""
    yield
    registered_families.cache_clear()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return distribution_with_family(tmp_path / "site")


@pytest.fixture
def parrot(models: dict[str, Path], tmp_path: Path) -> Path:
    return parrot_model(models["qwen2"], tmp_path / "model")


def test_both_directions_without_a_flag(run: CommandLine, site: Path, parrot: Path, tmp_path: Path) -> None:
    there = run("convert", parrot, tmp_path / "run", "--to", "torch_dist", path=site)
    assert there.returncode == 0, there.stderr
    assert "model family: Parrot (registered by parrot-families 1.5)" in there.stdout
    back = run("convert", tmp_path / "run", tmp_path / "back", "--to", "hf", "--json", path=site)
    assert back.returncode == 0, back.stderr
    assert "model family: Parrot (registered by parrot-families 1.5)" in json.loads(back.stdout)["notes"]
    assert_same_tensors(parrot, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["parrot_eps"] == 3e-4


def test_it_is_found_by_its_parameters_and_by_name(run: CommandLine, site: Path, parrot: Path, tmp_path: Path) -> None:
    """The Megatron checkpoint does not record where the model came from."""
    assert run("convert", parrot, tmp_path / "run", "--to", "torch_dist", path=site).returncode == 0
    (tmp_path / "run" / "release" / "tokenizer" / "config.json").unlink()
    for place, words in (("one", ()), ("two", ("--family", "Parrot")), ("three", ("--family", "parrot"))):
        back = run("convert", tmp_path / "run", tmp_path / place, "--to", "hf", *words, path=site)
        assert back.returncode == 0, back.stderr
        assert "registered by parrot-families 1.5" in back.stdout
        assert_same_tensors(parrot, tmp_path / place)
    alone = run("convert", tmp_path / "run", tmp_path / "four", "--to", "hf", path=tmp_path)
    assert alone.returncode == 2
    assert "the checkpoint matches no known model family" in alone.stderr


def test_no_code_runs_before_a_family_is_looked_for(
    run: CommandLine, site: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    """Neither help, nor a list, nor a model of this package's families imports the module, which would report it."""
    module = site / "parrot_families.py"
    module.write_text(f"import sys\nprint('imported', file=sys.stderr)\n{module.read_text()}")
    llama = ("convert", models["llama"], tmp_path / "run", "--to", "torch_dist")
    back = ("convert", tmp_path / "run", tmp_path / "back", "--to", "hf")
    for words in (("convert", "--help"), ("convert", "--list-families"), llama, back):
        done = run(*words, path=site)
        assert done.returncode == 0, done.stderr
        assert "imported" not in done.stderr, words
    listed = run("convert", "--list-families", path=site).stdout
    assert "parrot" in listed
    assert "registered by parrot-families 1.5" in listed
    assert "imported" in run(*back, "--force", "--family", "Parrot", path=site).stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "registers cannot be imported; found: ZeroDivisionError"),
        ("raise SystemExit(0)", "registers cannot be imported; found: SystemExit(0)"),
        ("import missing_module", "registers cannot be imported; found: ModuleNotFoundError"),
        ("Other = 1", "registers cannot be imported; found: AttributeError"),
        ("Parrot = dict", "is not a class derived from families.family.Family"),
        ("from mcore_ckpt_ext.families.llama import Llama as Parrot", "under another model_type than its own"),
        (
            "from mcore_ckpt_ext.families.family import Family\nclass Parrot(Family):\n    model_type = 'parrot'",
            "lacks attributes that every family must have; found: architecture, rules, settings",
        ),
    ],
)
def test_a_broken_one_is_an_error_that_names_its_distribution(
    run: CommandLine, code: str, said: str, site: Path, parrot: Path, tmp_path: Path
) -> None:
    (site / "parrot_families.py").write_text(code)
    done = run("convert", parrot, tmp_path / "run", "--to", "torch_dist", path=site)
    assert done.returncode == 2
    assert said in done.stderr
    assert "parrot-families 1.5" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["mismatches", "arguments", "tensors", "notices", "copies", "unmapped_tensors"])
def test_one_that_raises_is_an_error_that_names_its_distribution(
    run: CommandLine, method: str, site: Path, parrot: Path, tmp_path: Path
) -> None:
    module = site / "parrot_families.py"
    module.write_text(f"{module.read_text()}\n    def {method}(self, *_, **__):\n        raise KeyError('seed')\n")
    done = run("convert", parrot, tmp_path / "run", "--to", "torch_dist", path=site)
    assert done.returncode == 2
    assert (
        "the family Parrot (registered by parrot-families 1.5) raises an error; found: KeyError('seed')" in done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("member", [*MEMBERS, "__repr__"])
def test_each_member_that_raises_is_an_error_that_names_its_distribution(
    member: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attribute and method of `Family` is tested."""
    module, is_method = site / "parrot_families.py", callable(getattr(Family, member, None))
    decorator = "" if is_method else "    @property\n"
    module.write_text(f"{module.read_text()}\n{decorator}    def {member}(self, *_):\n        raise KeyError('seed')\n")
    monkeypatch.syspath_prepend(site)
    sys.modules.pop("parrot_families", None)
    (registered,) = registered_families(frozenset())
    with pytest.raises(UnsupportedCheckpointError, match=r"parrot-families 1\.5.*found: (KeyError|AttributeError)"):
        use(registered.load(), member, called=is_method)


def use(family: Family, member: str, *, called: bool) -> None:
    found = repr(family) if member == "__repr__" else getattr(family, member)
    if called:
        found()


def test_a_generator_that_raises(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator raises only when this package consumes it."""
    module = site / "parrot_families.py"
    module.write_text(f"{module.read_text()}\n    def copies(self, _):\n        yield 1 / 0\n")
    monkeypatch.syspath_prepend(site)
    sys.modules.pop("parrot_families", None)
    (registered,) = registered_families(frozenset())
    with pytest.raises(UnsupportedCheckpointError, match="ZeroDivisionError"):
        registered.load().copies(None)  # type: ignore[arg-type]


def test_broken_ones_do_not_affect_others(run: CommandLine, site: Path, parrot: Path, tmp_path: Path) -> None:
    """Registered families are tried for a Megatron checkpoint that matches no family of this package."""
    assert run("convert", parrot, tmp_path / "run", "--to", "torch_dist", path=site).returncode == 0
    (tmp_path / "run" / "release" / "tokenizer" / "config.json").unlink()
    broken = distribution_with_family(site, name="broken-families", model_type="broken", module="broken_families")
    (broken / "broken_families.py").write_text("1 / 0")
    damaged = site / "damaged-2.dist-info"
    damaged.mkdir()
    (damaged / "METADATA").write_text("Name: damaged\nVersion: 2\n")
    (damaged / "entry_points.txt").write_bytes(b"[mcore_ckpt_ext.families]\nx = \xff:\xfe\n")
    back = run("convert", tmp_path / "run", tmp_path / "back", "--to", "hf", path=site)
    assert back.returncode == 0, back.stderr
    assert "the family that broken-families 1.5 registers cannot be imported" in back.stderr
    assert "damaged" in back.stderr
    assert "Traceback" not in back.stderr
    assert_same_tensors(parrot, tmp_path / "back")


def test_the_family_of_this_package_stays_in_use(
    run: CommandLine, site: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    """A registered family with the same `model_type` is not loaded, and a warning explains how to use it."""
    rival = distribution_with_family(tmp_path / "rival", name="rival", model_type="llama", module="rival_families")
    (rival / "rival_families.py").write_text("1 / 0")
    done = run("convert", models["llama"], tmp_path / "run", "--to", "torch_dist", path=rival)
    assert done.returncode == 0, done.stderr
    assert "the family llama that rival 1.5 registers is not used: this package has a family" in done.stderr
    assert "--family path.py:Parrot" in done.stderr
    assert "registered by" not in done.stdout
