"""Test that mutable state is in one place: modules of patching and saving have no mutable globals."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mcore_ckpt_ext

PACKAGE = Path(mcore_ckpt_ext.__file__).parent
CONSTANT = (ast.Constant, ast.Tuple, ast.Name, ast.Attribute, ast.Subscript, ast.JoinedStr, ast.BinOp, ast.UnaryOp)
# What they make does not change; the values of a dictionary that is a table are looked at, too.
MAKERS = {
    "Path",
    "TypeVar",
    "ParamSpec",
    "getLogger",
    "object",
    "RLock",
    "MappingProxyType",
    "PatchPoint",
    "_patch_point",
    "Phase",
}
CACHES = {"cache", "lru_cache", "cached_property"}
THE_REGISTRY = "patching/singletons.py: PROCESS"
# Tables of frozen values, and what a child process keeps, which imports no more than it needs.
NOT_CONCERNED = {"megatron/policy.py", "megatron/load_facts.py", "megatron/saving/parent_watch.py"}


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_constant(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple):
        return all(is_constant(item) for item in value.elts)
    if isinstance(value, ast.Starred):
        return is_constant(value.value)
    if isinstance(value, ast.Call):
        return name_of(value.func) in MAKERS
    return isinstance(value, CONSTANT)


def changing(source: str) -> Iterator[str]:
    """The globals of a module that may change: what is no constant, what a function assigns, what remembers calls."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and not is_constant(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name_of(target) for target in targets if name_of(target) != "__all__")
    # What a function defines inside itself is made anew by each call, and remembers nothing from one to the next.
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inner = {node for function in functions for node in ast.walk(function) if node is not function}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
        if isinstance(node, ast.FunctionDef) and node not in inner:
            names = {name_of(item.func if isinstance(item, ast.Call) else item) for item in node.decorator_list}
            yield from (f"@{name} {node.name}" for name in names & CACHES)


def test_one_registry_and_nothing_else() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for folder in ("patching", "megatron", "megatron/saving", "megatron/sources")
        for path in (PACKAGE / folder).glob("*.py")
        if str(path.relative_to(PACKAGE)) not in NOT_CONCERNED
        for name in changing(path.read_text())
    }
    assert found == {THE_REGISTRY}


@pytest.mark.parametrize(
    "source",
    [
        "under_way = []",
        "recorded: dict[str, int] = {}",
        "watches = WeakKeyDictionary()",
        "active = None\ndef f():\n    global active\n    active = 1",
        "@functools.cache\ndef registry(): ...",
        "class Loads:\n    @functools.cache\n    def registry(self): ...",
        "found = (1, [])",
    ],
)
def test_changes_are_found(source: str) -> None:
    assert list(changing(source))


def test_objects_made_by_each_call_are_not_found() -> None:
    assert not list(changing("def reader():\n    @functools.cache\n    def groups(): ...\n    return groups"))
