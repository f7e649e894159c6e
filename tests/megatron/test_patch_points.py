"""Test that every name of a framework's module that a wrapper reads is declared at its patch point.

The names are derived from the source: whatever reads or replaces a name in the globals of a wrapped function calls
them `scope` or `self._scope`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from changed_tests import imported_modules

import mcore_ckpt_ext
from mcore_ckpt_ext.job.release_names import FIRST_WITH_NAME
from mcore_ckpt_ext.megatron.patch_points import PATCH_POINTS

PACKAGE = Path(mcore_ckpt_ext.__file__).parent
SCOPES = {"scope", "self._scope"}


def names_read(source: str) -> set[str]:
    """Return the names of a framework's module that a source reads, tests for, replaces or sets."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def text(node: ast.expr | None) -> list[str]:
        value = constants.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
        return [value] if isinstance(value, str) else []

    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=owner, slice=name) if ast.unparse(owner) in SCOPES:
                found += text(name)
            case ast.Compare(left=name, ops=[ast.In() | ast.NotIn()], comparators=[owner]) if (
                ast.unparse(owner) in SCOPES
            ):
                found += text(name)
            case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[name, *_]) if ast.unparse(owner) in SCOPES:
                found += text(name)
            case ast.Call(func=ast.Name(id="overridden"), args=[owner], keywords=keywords) if (
                ast.unparse(owner) in SCOPES
            ):
                found += [keyword.arg for keyword in keywords if keyword.arg is not None]
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Call(func=owner, args=[module]), name, _]) if (
                ast.unparse(owner) == "sys.modules.get"
            ):
                found += [f"{there}:{read}" for there in text(module) for read in text(name) if read != "__version__"]
    return set(found)


def required_of_modules(source: str) -> list[str]:
    """Return what a source reads from an imported module as an attribute, which fails if the module lacks it."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return [ast.unparse(node) for node in nodes if ast.unparse(node.value).startswith("sys.modules[")]


def test_names_are_required_of_scopes_alone() -> None:
    """Others would be missing in a job without a word of `doctor`."""
    found = (required_of_modules(path.read_text()) for path in (PACKAGE / "megatron").rglob("*.py"))
    assert [name for names in found for name in names] == []
    assert required_of_modules("sys.modules['a.b'].name()") == ["sys.modules['a.b'].name"]


def closure(module: str) -> set[Path]:
    """Return the files below `megatron/` that a module imports, directly or by way of others, with its own."""
    paths: set[Path] = set()
    left = [module]
    while left:
        path = PACKAGE.parent / (left.pop().replace(".", "/") + ".py")
        if path.exists() and path not in paths and (PACKAGE / "megatron") in path.parents:
            paths.add(path)
            left += imported_modules(path.read_text())
    return paths


def test_every_name_that_is_read_is_declared_and_no_other() -> None:
    read = set().union(*(names_read(path.read_text()) for path in (PACKAGE / "megatron").rglob("*.py")))
    declared = {name for patch_point in PATCH_POINTS for name in patch_point.reads}
    assert read == declared
    assert {"get_args", "_load_base_checkpoint", "load_preprocess", "DistributedOptimizer"} <= read


def test_names_are_declared_where_they_are_read() -> None:
    """Whatever a wrapper's own module reads is declared at its row, and what is declared is read below it."""
    missing, unread = defaultdict(set), defaultdict(set)
    for patch_point in PATCH_POINTS:
        wrapper = patch_point.wrapper.partition(":")[0]
        below = set().union(*(names_read(path.read_text()) for path in closure(wrapper)))
        own = {name for row in PATCH_POINTS if row.wrapper.startswith(f"{wrapper}:") for name in row.reads}
        missing[wrapper] |= names_read((PACKAGE.parent / (wrapper.replace(".", "/") + ".py")).read_text()) - own
        unread[wrapper] |= set(patch_point.reads) - below
    assert {wrapper: names for wrapper, names in (missing | unread).items() if names} == {}


def test_first_releases_are_those_of_names_that_are_used() -> None:
    used = {name for patch_point in PATCH_POINTS for name in patch_point.reads}
    attributes = {location.partition(":")[2] for patch_point in PATCH_POINTS for location in patch_point.locations}
    assert FIRST_WITH_NAME.keys() <= used | attributes


@pytest.mark.parametrize(
    "source",
    [
        "scope['name']()",
        "self._scope['name'] = None",
        "scope.get('name', lambda: 1)",
        "self._scope.get('name')",
        "'name' in scope",
        "overridden(scope, name=1)",
        "_NAME = 'name'\ndef f():\n    return scope.get(_NAME)",
    ],
)
def test_ways_to_read_are_found(source: str) -> None:
    assert names_read(source) == {"name"}


def test_names_of_other_modules_are_found() -> None:
    assert names_read("getattr(sys.modules.get('a.b'), 'name', None)") == {"a.b:name"}
