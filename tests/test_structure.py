"""Test the structure: tests share code only through `tests/harness`, and import no other test."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Set
from importlib import import_module
from pathlib import Path

import pytest
from changed_tests import imported_modules, module_of

TESTS = Path(__file__).parent
HARNESS = ("tests", "harness")


def mistakes(path: Path, source: str) -> list[str]:
    """The imports of a file below `tests` that it must not have."""
    folder = ("tests", *path.relative_to(TESTS).parent.parts)
    found = []
    for name in imported_modules(source):
        module = tuple(name.split("."))
        is_test = module[0] == "tests" and any(part.startswith(("test_", "conftest")) for part in module)
        is_own = len(folder) > 1 and module[: len(folder)] == folder
        is_elsewhere = len(module) > 1 and module[0] == "tests" and not is_own and module[:2] != HARNESS
        if is_test or is_elsewhere:
            found.append(".".join(module))
    return found


def test_tests_share_the_harness_and_nothing_else() -> None:
    found = {str(path.relative_to(TESTS)): mistakes(path, path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("test_one.py", "from tests.test_other import helper"),
        ("test_one.py", "import tests.jobs.versions.matrix"),
        ("jobs/test_one.py", "def late():\n    from tests.huggingface import models"),
        ("jobs/test_one.py", "if TYPE_CHECKING:\n    from tests.huggingface import models"),
        ("jobs/test_one.py", "from tests.conftest import fixture"),
        ("harness/one.py", "from tests.jobs import conftest"),
    ],
)
def test_misplaced_imports_are_found(path: str, source: str) -> None:
    assert mistakes(TESTS / path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("test_one.py", "from tests.harness.jobs import run_job"),
        ("fuzz/test_one.py", "from tests.fuzz import edits"),
        ("jobs/versions/test_one.py", "from tests.jobs.versions.matrix import Shown"),
        ("test_one.py", "import pytest"),
    ],
)
def test_allowed_imports_pass(path: str, source: str) -> None:
    assert not mistakes(TESTS / path, source)


PACKAGE = TESTS.parent / "mcore_ckpt_ext"
TABLE = "job/releases.py"
NAMES = "job/release_names.py"
_ORDERING = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def compares_versions(source: str) -> list[int]:
    """The lines that order versions, compare with one, or take an argument that jobs lack for their release."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            orders = any(isinstance(how, _ORDERING) for how in node.ops) and any(map(_is_version, sides))
            if orders or any(map(_is_release, sides)) or any(map(_is_text_of_a_release, sides)):
                found.append(node.lineno)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "absent_in_version"
        ):
            found.append(node.lineno)
    return found


def names_a_release(source: str) -> list[int]:
    """The lines that name a release of Megatron by its numbers: `Version(0, 16)` or `(0, 16)`."""
    nodes = ast.walk(ast.parse(source))
    return [node.lineno for node in nodes if isinstance(node, ast.expr) and (_is_release(node) or _makes_release(node))]


def _makes_release(node: ast.expr) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Version"
    return is_call and all(map(_is_number, node.args))  # type: ignore[attr-defined]


def _is_release(node: ast.expr) -> bool:
    """Whether an expression is a pair of numbers that may be a release of Megatron: `(0, 16)`, but not `(0, 0)`."""
    numbers = ast.literal_eval(node) if isinstance(node, ast.Tuple) and all(map(_is_number, node.elts)) else ()
    return len(numbers) == 2 and numbers[0] == 0 and numbers[1] > 1


def _is_text_of_a_release(node: ast.expr) -> bool:
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and bool(re.fullmatch(r"0\.\d+(\.\d+)?", text))


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _is_version(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return _is_release(node)
    if isinstance(node, ast.Call):
        return _is_version(node.func)
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    is_release = "version" in name.lower() and name != "version_info"  # which is Python's
    return is_release or "SINCE" in name or name in ("OLDEST", "NEWEST", "major", "minor")


def test_releases_are_distinguished_in_one_table() -> None:
    """Whatever depends on a release of Megatron is a row with its source; see `job/releases.py`."""
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {
        path: lines
        for path, source in sources.items()
        if (lines := compares_versions(source)) and path not in (TABLE, NAMES)
    }
    assert found == {}, "add a row to job/releases.py instead"
    named = {path for path, source in sources.items() if names_a_release(source)}
    assert named == {TABLE, NAMES, "versions.py"}, "a release is named by a row of job/releases.py"


@pytest.mark.parametrize(
    "source",
    [
        "version >= (0, 14)",
        "(0, 14) <= job.version < newest",
        "megatron_version() < limit",
        "found < Version(0, 16)",
        "found >= _SPLIT_POSSIBLE_SINCE",
        "arguments.absent_in_version('moe_grouped_gemm')",
        "version == (0, 16)",
        "release.minor >= newest",
        "written_for == '0.16.1'",
    ],
)
def test_version_comparisons_are_found(source: str) -> None:
    assert compares_versions(source)


@pytest.mark.parametrize(
    ("source", "named"),
    [("x = (0, 19)", True), ("f(first, Version(0, 8))", True), ("share = (0, 1)", False), ("Version(*found)", False)],
)
def test_names_of_releases_are_found(source: str, named: bool) -> None:
    assert bool(names_a_release(source)) == named


@pytest.mark.parametrize(
    "source", ["share < 0.16", "rows >= (first, last)", "version == other", "a < b", "lacks(name)", "chunk == (0, 0)"]
)
def test_other_comparisons_pass(source: str) -> None:
    assert not compares_versions(source)


def format_classes() -> dict[str, Path]:
    """The classes that read or write a format, or are the options of one, and the format's own folder of each."""
    bases: dict[str, set[str]] = {}
    folders: dict[str, Path] = {}
    written: set[str] = set()
    for path in (PACKAGE / "formats").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
                folders[node.name] = path.parent
                written |= {node.name} if path.name == "writer.py" else set()
    found = {"FormatReader", "Target"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return {name: folders[name] for name in found | written}


def looks_at_classes(source: str, classes: set[str]) -> int:
    """How often a source looks at one of some classes: by `isinstance`, `type(...)`, a pattern, or a format's name."""
    count = 0
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, named]):
                count += _names_one_of(named, classes)
            case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=[named]):
                count += _names_one_of(named, classes)
            case ast.MatchClass(cls=named):
                count += _names_one_of(named, classes)
            case ast.Compare(left=ast.Attribute(attr="format"), ops=[ast.Eq() | ast.NotEq() | ast.In() | ast.NotIn()]):
                count += 1
            case ast.Compare(left=ast.Attribute(attr="name", value=ast.Attribute(attr="format"))):
                count += 1
    return count


def _names_one_of(node: ast.expr, classes: set[str]) -> bool:
    names = {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in ast.walk(node)}
    return bool(names & classes)


def test_formats_answer_for_themselves() -> None:
    """What others need to know of a format is a field of a part of a checkpoint, of `Target` or of `Format`."""
    classes = format_classes()
    assert {"TorchDistCheckpoint", "PeftCheckpoint", "ColossalAICheckpoint", "LegacyTarget", "Canonical"} <= set(
        classes
    )
    found = {}
    for path in PACKAGE.rglob("*.py"):
        others = {name for name, folder in classes.items() if folder != path.parent}
        found[str(path.relative_to(PACKAGE))] = looks_at_classes(path.read_text(), others)
    assert {path: count for path, count in found.items() if count} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("isinstance(one.format.reader, LegacyCheckpoint)", 1),
        ("isinstance(one, (str, TorchDistCheckpoint)) or type(one) is not LegacyCheckpoint", 2),
        ("isinstance(one, legacy.LegacyCheckpoint)", 1),
        ("match one:\n case LegacyCheckpoint() | formats.torch_dist.TorchDistCheckpoint(): ...", 2),
        ("checkpoint.format == 'legacy' or found.format in (NAME, 'zarr')", 2),
        ("checkpoint.format.name == 'legacy'", 1),
        ("isinstance(one, Path)", 0),
    ],
)
def test_which_looks_are_counted(source: str, count: int) -> None:
    assert looks_at_classes(source, {"LegacyCheckpoint", "TorchDistCheckpoint"}) == count


# Modules of torch that belong to one kind of device, and what only a tensor of one kind has.
DEVICE_MODULES = {"accelerator", "cuda", "hpu", "mps", "mtia", "npu", "xpu"}
DEVICE_MEMBERS = {"cuda", "get_device", "is_cuda", "is_npu", "is_xpu", "npu", "xpu"}
DEVICES = "devices.py"


def names_a_device(source: str) -> list[int]:
    """Return the lines of a source that name a kind of accelerator: a module of torch, a tensor's member, a string."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in DEVICE_MODULES:
                found.append(node.lineno)
            case ast.Attribute(value=value, attr=name) if name in DEVICE_MEMBERS and ast.unparse(value) != "torch":
                found.append(node.lineno)
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "torch":
                imported = {*module.split("."), *(alias.name for alias in names)}
                found += [node.lineno] if imported & DEVICE_MODULES else []
            case ast.Import(names=names):
                parts = {part for alias in names if alias.name.startswith("torch.") for part in alias.name.split(".")}
                found += [node.lineno] if parts & DEVICE_MODULES else []
            case ast.Constant(value=str(text)) if text.partition(":")[0] in DEVICE_MODULES:
                found.append(node.lineno)
    return found


def test_one_module_names_accelerators() -> None:
    """A job may run on ROCm, XPU or Ascend; see `devices.py`."""
    found = {str(path.relative_to(PACKAGE)): names_a_device(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert [path for path, lines in found.items() if lines] == [DEVICES], found


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.is_available()",
        "torch.accelerator.current_accelerator()",
        "tensor.is_cuda",
        "tensor.cuda()",
        "torch.device('cuda', 0)",
        "tensor.device.type in ('cpu', 'cuda')",
        "tensor.to('cuda:0')",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Event",
    ],
)
def test_names_of_devices_are_found(source: str) -> None:
    assert names_a_device(source)


@pytest.mark.parametrize(
    "source",
    ["tensor.device.type == 'cpu'", "chunk.cuda_global_chunk", "'cuda is not here'", "import torch.distributed"],
)
def test_code_without_devices_passes(source: str) -> None:
    assert not names_a_device(source)


MOST_LINES = 350


def test_no_module_is_too_long() -> None:
    """A longer one does several things: give each a module."""
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def between_cycles(imports: Mapping[str, Set[str]]) -> set[str]:
    """The modules that import themselves by way of others, and those on a way from one such circle to another."""
    left = {module: {*named} & imports.keys() for module, named in imports.items()}
    while ends := {module for module, named in left.items() if not named} | left.keys() - set().union(*left.values()):
        left = {module: named - ends for module, named in left.items() if module not in ends}
    return set(left)


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports for annotations alone count as well: dependencies between modules have one direction.

    The package itself is left out: it lists the modules of its public names, and each module's import imports it.
    """
    sources = {module_of(str(path.relative_to(PACKAGE.parent))): path.read_text() for path in PACKAGE.rglob("*.py")}
    del sources[PACKAGE.name]
    assert between_cycles({module: {*imported_modules(source)} for module, source in sources.items()}) == set()


def test_which_modules_form_cycles() -> None:
    assert between_cycles({"a": {"b"}, "b": {"a", "d"}, "c": {"a"}, "d": {"e"}, "e": set()}) == {"a", "b"}
    assert between_cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


OPTIMIZERS = "optimizers"


def names_an_optimizer_format(source: str, names: Set[str]) -> list[int]:
    """Return the lines of a source that name an optimizer format: by a string, or by a constant for one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if text in names:
                found.append(node.lineno)
            case ast.ImportFrom(module=str(module), names=aliases) if f".{OPTIMIZERS}." in module:
                constants = (getattr(import_module(module), alias.name, None) for alias in aliases)
                found += [node.lineno for constant in constants if isinstance(constant, str) and constant in names]
    return found


def test_optimizer_formats_are_named_by_their_table_alone() -> None:
    """What others need to know of one is a trait of its `Encoding`, or a function of `optimizers/table.py`.

    `fsdp_dtensor` is also the name of a checkpoint format (`--ckpt-format`).
    """
    from mcore_ckpt_ext.formats.plain_dcp import FSDP_DTENSOR
    from mcore_ckpt_ext.optimizers.table import FORMATS

    names = {*FORMATS} - {FSDP_DTENSOR}
    assert len(names) >= 8
    sources = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {
        str(path): lines
        for path, source in sources.items()
        if path.parts[0] != OPTIMIZERS and (lines := names_an_optimizer_format(source, names))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "format == 'dp_reshardable'",
        "KINDS = ('legacy', 'fully_reshardable')",
        "from mcore_ckpt_ext.optimizers.bucket_formats import DP_RESHARDABLE",
    ],
)
def test_names_of_optimizer_formats_are_found(source: str) -> None:
    assert names_an_optimizer_format(source, {"dp_reshardable", "fully_reshardable"}) == [1]
