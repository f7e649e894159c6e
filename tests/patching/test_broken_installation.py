"""Test that a broken or half-removed installation never stops `import torch`, and logs one line."""

from __future__ import annotations

import json
import marshal
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import pytest

from tests.harness.checkpoints import fixture_named
from tests.harness.torch_release import with_plugins

pytestmark = [with_plugins, pytest.mark.thorough]
REPOSITORY = Path(__file__).parents[2]
SOURCES = ("mcore_ckpt_ext", "mcore_ckpt_ext_autoload.py", "pyproject.toml", "setup.py", "LICENSE", "README.md")
NOBODY = 65534

# What `import torch` does at its end (torch/__init__.py, 2.5 to 2.15), once for each installation in a process of its
# own: torch itself, which takes seconds, is imported once. `-S`, so that nothing of this environment is found as well.
LOOK = """
import json, os, site, sys, tempfile
import torch

def looked(folder, user):
    with tempfile.TemporaryFile() as told:
        child = os.fork()
        if not child:
            os.dup2(told.fileno(), 2)
            if user:
                os.setuid(user)
            sys.path.insert(0, folder)
            site.addsitedir(folder)  # an editable installation is found by a file in it
            code = 1
            try:
                torch._import_device_backends()
                code = 0
            except BaseException as error:
                print(f"BROKEN: {error!r}", file=sys.stderr, flush=True)
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        told.seek(0)
        return code, told.read().decode()

print(json.dumps([looked(*place) for place in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is installed here but this package: links to it, without the files that would add to the path."""
    folder = tmp_path_factory.mktemp("libraries")
    for path in map(Path, sys.path):
        for entry in path.iterdir() if path.name in ("site-packages", "dist-packages") else ():
            ours = entry.name.startswith(("mcore_ckpt_ext", "__editable__", "_mcore_ckpt_ext"))
            if not ours and not (folder / entry.name).is_symlink():
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone has of this package."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        copy(REPOSITORY / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def whole(source: Path) -> Iterator[Path]:
    """What `pip install --target` makes of this package, in a folder that every user may enter.

    pytest's own folders may be entered by their owner alone, and each session of pytest sees to it anew.
    """
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield _installed(source, Path(folder) / "whole")


def _installed(source: Path, target: Path) -> Path:
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)],
        check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    return target


@pytest.fixture(scope="module")
def editable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install --editable` makes of it; the clone that it names was moved away thereafter."""
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("editable")
    clone = tmp_path_factory.mktemp("clones") / "clone"
    shutil.copytree(source, clone)
    code = "import sys, setuptools.build_meta as build; build.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(wheels)], cwd=clone, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(target)
    clone.rename(clone.with_name("moved"))
    return target


def python(libraries: Path, code: str, *words: str, before: str = "", **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of an interpreter that finds the libraries and nothing else."""
    paths = os.pathsep.join(filter(None, [before, str(libraries)]))
    known = {name: value for name, value in os.environ.items() if not name.startswith("MCORE_CKPT_EXT")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, *words], capture_output=True, text=True, timeout=300, check=False,
        cwd=libraries, env={**known, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def nothing(site: Path) -> None:
    """Negative control."""


def without_the_package(site: Path) -> None:
    shutil.rmtree(site / "mcore_ckpt_ext")


def without_a_module(site: Path) -> None:
    (site / "mcore_ckpt_ext" / "patching" / "registry.py").unlink()


def without_all_modules(site: Path) -> None:
    for path in (site / "mcore_ckpt_ext").rglob("*.py"):
        path.unlink()


def a_file_in_place_of_the_package(site: Path) -> None:
    shutil.rmtree(site / "mcore_ckpt_ext")
    (site / "mcore_ckpt_ext").touch()


def an_empty_file(site: Path) -> None:
    (site / "mcore_ckpt_ext" / "settings.py").write_bytes(b"")


def half_a_file(site: Path) -> None:
    path = site / "mcore_ckpt_ext" / "patching" / "registry.py"
    path.write_bytes(path.read_bytes()[:2000])


def a_file_of_zeros(site: Path) -> None:
    """After a crash, on a file system that had made room for it only."""
    (site / "mcore_ckpt_ext" / "__init__.py").write_bytes(bytes(4096))


def a_file_that_may_not_be_read(site: Path) -> None:
    (site / "mcore_ckpt_ext" / "megatron" / "patch_points.py").chmod(0)


def a_folder_that_may_not_be_entered(site: Path) -> None:
    (site / "mcore_ckpt_ext").chmod(0)


def a_link_to_nowhere(site: Path) -> None:
    (site / "mcore_ckpt_ext" / "settings.py").unlink()
    (site / "mcore_ckpt_ext" / "settings.py").symlink_to(site / "gone")


def _compiled(site: Path, code: bytes) -> None:
    source = site / "mcore_ckpt_ext" / "settings.py"
    about = source.stat()
    compiled = Path(cache_from_source(str(source)))
    compiled.parent.mkdir(exist_ok=True)
    numbers = b"".join(int(number).to_bytes(4, "little") for number in (0, about.st_mtime, about.st_size))
    compiled.write_bytes(MAGIC_NUMBER + numbers + code)


def damaged_byte_code(site: Path) -> None:
    _compiled(site, b"\xff" * 64)


def byte_code_of_an_older_release(site: Path) -> None:
    """With the time and size of the present source, as a copy that keeps times can make it."""
    _compiled(site, marshal.dumps(compile("MEANING = {}", "settings.py", "exec")))


def byte_code_without_its_source(site: Path) -> None:
    (site / "mcore_ckpt_ext" / "settings.py").unlink()
    (site / "mcore_ckpt_ext" / "settings.pyc").write_bytes(b"\x00\x00\r\n" + bytes(64))


def half_an_upgrade(site: Path) -> None:
    """A module of another release, which wants of its neighbor what that does not have."""
    path = site / "mcore_ckpt_ext" / "patching" / "registry.py"
    path.write_text(path.read_text().replace("import PostImportFinder", "import NewFinder as PostImportFinder"))


def without_what_it_needs(site: Path) -> None:
    path = site / "mcore_ckpt_ext" / "megatron" / "installation.py"
    path.write_text(path.read_text().replace("from typing", "import not_installed\nfrom typing", 1))


def a_module_that_ends_the_program(site: Path) -> None:
    (site / "mcore_ckpt_ext" / "settings.py").write_text("raise SystemExit(3)")


def metadata_of_an_older_release_beside_it(site: Path) -> None:
    """Whichever of the two Python finds first."""
    (found,) = site.glob("*.dist-info")
    (site / "mcore_ckpt_ext-0.0.9.dist-info").mkdir()
    old = "[torch.backends]\nmcore_ckpt_ext = mcore_ckpt_ext_autoload:register\n"
    (site / "mcore_ckpt_ext-0.0.9.dist-info" / "entry_points.txt").write_text(old)
    shutil.rmtree(found)


def nothing_but_the_entry_point(site: Path) -> None:
    """As a removal by hand leaves it: the package is gone, and all of its metadata but the entry point."""
    without_the_package(site)
    (found,) = site.glob("*.dist-info")
    for path in found.rglob("*"):
        if path.is_file() and path.name != "entry_points.txt":
            path.unlink()


# What a damage makes Python say, and nothing where the hooks are there in spite of it.
DAMAGES: Mapping[Callable[[Path], None], str] = {
    nothing: "",
    without_the_package: "ModuleNotFoundError",
    without_a_module: "ModuleNotFoundError",
    without_all_modules: "ModuleNotFoundError",
    a_file_in_place_of_the_package: "ModuleNotFoundError",
    an_empty_file: "ImportError",
    half_a_file: "Error",
    # A SyntaxError since Python 3.11.4, before it a ValueError.
    a_file_of_zeros: "Error: source code string cannot contain null bytes",
    a_file_that_may_not_be_read: "PermissionError",
    a_folder_that_may_not_be_entered: "Error",
    a_link_to_nowhere: "ModuleNotFoundError",
    damaged_byte_code: "ValueError",
    byte_code_of_an_older_release: "ImportError",
    byte_code_without_its_source: "ImportError",
    half_an_upgrade: "ImportError",
    without_what_it_needs: "No module named 'not_installed'",
    a_module_that_ends_the_program: "SystemExit",
    metadata_of_an_older_release_beside_it: "",
    nothing_but_the_entry_point: "ModuleNotFoundError",
}


MOVED = "an editable installation whose clone was moved"


@pytest.fixture(scope="module")
def told(whole: Path, editable: Path, libraries: Path) -> Mapping[str, tuple[int, str]]:
    """Of each damage, how torch ended, and what stood on stderr."""
    places = []
    # Root may read what nobody may: these are looked at as a user who is none.
    user = NOBODY if not os.geteuid() else 0
    for damage in DAMAGES:
        site = whole.parent / damage.__name__
        shutil.copytree(whole, site)
        damage(site)
        places.append([str(site), user if "may_not" in damage.__name__ else 0])
    places.append([str(editable), 0])
    code, out, err = python(libraries, LOOK, json.dumps(places), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert code == 0, err
    names = [*(damage.__name__ for damage in DAMAGES), MOVED]
    return dict(zip(names, map(tuple, json.loads(out)), strict=True))


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_torch_goes_on(damage: Callable[[Path], None], told: Mapping[str, tuple[int, str]]) -> None:
    code, err = told[damage.__name__]
    assert code == 0, err
    expected = DAMAGES[damage]
    assert len(err.splitlines()) == bool(expected), err
    assert expected in err
    assert not err or ("the hooks are not installed" in err and "pip uninstall mcore_ckpt_ext" in err)


def test_torch_goes_on_without_the_clone_of_an_editable_installation(told: Mapping[str, tuple[int, str]]) -> None:
    code, err = told[MOVED]
    assert code == 0, err
    assert "the hooks are not installed: ModuleNotFoundError: No module named 'mcore_ckpt_ext'" in err


@pytest.mark.parametrize("damage", [without_the_package, a_module_that_ends_the_program], ids=lambda d: d.__name__)
def test_a_whole_program_goes_on(
    damage: Callable[[Path], None], told: Mapping[str, tuple[int, str]], whole: Path, libraries: Path
) -> None:
    """The same by `import torch` itself."""
    site = str(whole.parent / damage.__name__)
    assert python(libraries, "import torch; print(torch.ones(2).sum())", before=site) == (
        0, "tensor(2.)\n", told[damage.__name__][1],
    )  # fmt: skip


def test_a_command_explains_an_entry_point_without_its_module(whole: Path, libraries: Path, tmp_path: Path) -> None:
    """There torch raises before any code of this package runs."""
    site = tmp_path / "site"
    shutil.copytree(whole, site)
    (site / "mcore_ckpt_ext_autoload.py").unlink()
    checkpoint = fixture_named("p02").run
    for command in (["doctor"], ["verify", str(checkpoint)]):
        code, out, err = python(
            libraries, "from mcore_ckpt_ext.cli.main import main; raise SystemExit(main())", *command, before=str(site)
        )
        assert code == (1 if command == ["doctor"] else 2)
        text = " ".join((out + err).split())
        assert "torch cannot be imported: its plugin mcore_ckpt_ext cannot be loaded" in text
        assert "No module named 'mcore_ckpt_ext_autoload'" in text
        assert "pip uninstall mcore_ckpt_ext" in text and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in text
        assert "Traceback" not in text


def test_it_is_the_package_that_would_stop_it(whole: Path, libraries: Path, tmp_path: Path) -> None:
    """Negative control: an entry point in the package would end `import torch`."""
    shutil.copytree(whole, tmp_path / "site")
    without_the_package(tmp_path / "site")
    (entry_points,) = (tmp_path / "site").glob("*.dist-info/entry_points.txt")
    text = entry_points.read_text()
    entry_points.write_text(text.replace("mcore_ckpt_ext_autoload:", "mcore_ckpt_ext.autoload:"))
    code, _, err = python(libraries, "import torch", before=str(tmp_path / "site"))
    assert code == 1
    assert "Failed to load the backend extension: mcore_ckpt_ext" in err
