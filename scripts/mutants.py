"""Mutants: functions with one change each, chosen at random, for `mutation_run.py`."""

from __future__ import annotations

import ast
import copy
import fnmatch
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from changed_tests import PACKAGE

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True)
class Mutant:
    """A function with one change.

    Attributes:
        path: path of the module, relative to the repository.
        function: qualified name of the function, as in Python (`Class.method`).
        line: line of the change.
        change: the former and the new code.
        source: source of the whole module, with the change.
    """

    path: str
    function: str
    line: int
    change: str
    source: str


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions and methods of a module with their names, except protocols, abstract methods, overloads."""
    for node in ast.iter_child_nodes(tree):
        inside = within
        if isinstance(node, ast.FunctionDef):
            names = {getattr(one, "id", getattr(one, "attr", "")) for one in node.decorator_list}
            if not names & {"overload", "abstractmethod"} and any(changes(node)):
                yield f"{within}{node.name}", node
            inside = f"{within}{node.name}.<locals>."
        elif isinstance(node, ast.ClassDef):
            inside = f"{within}{node.name}."
        yield from functions(node, inside)


def changes(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the places of a function that can be changed, each with its replacement.

    Annotations, docstrings, defaults, the text of messages, and `strict` of `zip` are left alone: no test should depend
    on them. Functions within it are listed for themselves.
    """
    for statement in function.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            continue
        for node in _reached(statement):
            changed: ast.AST = copy.deepcopy(node)
            if isinstance(changed, ast.Expr) and isinstance(changed.value, ast.Call):
                yield node, ast.Pass()
            elif _is_changed(changed):
                yield node, changed


def _is_changed(node: ast.AST) -> bool:
    """Change an expression or statement in place; return whether there is a change for its kind."""
    if isinstance(node, ast.Return) and not _nothing(node.value):
        node.value = ast.Constant(None)
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    else:
        return _has_changed_operator(node)
    return True


def _has_changed_operator(node: ast.AST) -> bool:
    """Exchange an operator in place; return whether there is another one."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        node.ops = [_COMPARISONS[type(node.ops[0])]()]
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _text(node):
        node.op = _ARITHMETIC[type(node.op)]()
    else:
        return False
    return True


def _reached(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a node, without those whose change does not affect tests."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return  # a guard against mistakes of this package
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, (ast.Raise, ast.JoinedStr)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                yield from _reached(child)


def _text(node: ast.BinOp) -> bool:
    return any(
        isinstance(part, (ast.JoinedStr, ast.List, ast.Tuple)) or _is_str(part) for part in (node.left, node.right)
    )


def _is_str(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _nothing(value: ast.AST | None) -> bool:
    """Return whether None says the same: no value, None itself, or a constant that counts as false."""
    return value is None or isinstance(value, ast.Constant) and not value.value


def mutants(repository: Path, count: int, seed: int, pattern: str) -> list[Mutant]:
    """Choose functions at random, and one change for each."""
    chosen = random.Random(seed)
    found: list[tuple[str, str, int]] = []
    for path in sorted((repository / PACKAGE).rglob("*.py")):
        name = path.relative_to(repository).as_posix()
        if fnmatch.fnmatch(name, pattern):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [(name, function, node.lineno) for function, node in functions(tree)]
    return [_changed(repository, chosen, *one) for one in chosen.sample(found, min(count, len(found)))]


def _changed(repository: Path, chosen: random.Random, path: str, name: str, line: int) -> Mutant:
    source = (repository / path).read_text(encoding="utf-8")
    function = next(one for found, one in functions(ast.parse(source)) if (found, one.lineno) == (name, line))
    node, changed = chosen.choice(list(changes(function)))
    lines = source.splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1  # type: ignore[attr-defined]
    start, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
    before = lines[first].encode()[:start].decode()
    after = lines[last].encode()[end:].decode()
    indent = "\n" + " " * start
    new = indent.join(ast.unparse(ast.fix_missing_locations(changed)).splitlines())
    new = new if isinstance(node, ast.stmt) else f"({new})"
    text = "".join(lines[:first]) + before + new + after + "".join(lines[last + 1 :])
    ast.parse(text)
    change = f"{_short(ast.unparse(node))}  ->  {_short(new)}"
    return Mutant(path, name, node.lineno, change, text)  # type: ignore[attr-defined]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 70 else f"{line[:67]}..."
