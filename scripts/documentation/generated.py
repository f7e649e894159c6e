"""Generates parts of the reference from the code: the command line, the settings, and all error messages.

python -m scripts.documentation.generated                writes all parts into the pages of docs/
python -m scripts.documentation.generated command plan   prints one part, as Markdown

A page contains a part between two marks, so that it is whole wherever it is read:

<!-- generated: command plan -->
<!-- end of generated -->
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "mcore_ckpt_ext"
_GENERATED = re.compile(r"(<!-- generated: (\w+)(?: (\w+))? -->\n).*?(<!-- end of generated -->\n)", re.DOTALL)
_UNKNOWN = "…"
# Hints for messages that do not have their own.
_IN_GENERAL = {
    "CheckpointError": "Read what was found and expected; where several ranks speak, the first reason is the cause.",
    "UnreadableCheckpointError": "Run `mcore-ckpt verify`. If it finds errors, use another iteration, or copy again.",
    "UnsafePickleError": "Do not load this file with anything else. Ask whoever wrote it; if it is yours, report it.",
    "UnsupportedCheckpointError": "Convert it to a format that is read, or resume it with the Megatron that wrote it.",
    "UnknownNameError": "List what there is: `names(kind)`, `kinds()`, or `mcore-ckpt inspect PATH --all`.",
    "PackingError": "Resume under its own layout, save once with the package installed, and change the layout then.",
    "ProofError": "Run `mcore-ckpt verify`: the masters or the weights are damaged. Use another iteration.",
    "ModelMismatchError": "Compare the model arguments of your job with those that `mcore-ckpt inspect` shows.",
    "ResumeRefusedError": "Nothing was changed. The message has the reasons of all ranks: search for them here.",
    "SaveFailedError": "Earlier checkpoints are untouched. Look at the disk (full, quota, rights), and start again.",
    "StorageError": "Try again when the disk or the store answers. Nothing is known about the content.",
    "LostProcessError": "Start all processes again, a conversion with `--resume`. Nothing is known about the content.",
    "UsageError": "See `mcore-ckpt COMMAND --help`, or the reference of the Python API.",
    "DestinationError": "Nothing was published. Choose another folder, or free what the message names.",
}


# What an error is about, by the path of the module that raises it in the package.
SUBJECTS = {
    "colossalai/": "colossalai", "formats/colossalai/": "colossalai",
    "families/": "models", "formats/hugging_face/": "models", "formats/peft/": "models", "formats/adapter": "models",
    "formats/low_rank": "models", "megatron/": "jobs", "rehearsal/": "jobs", "optimizer_reshard": "jobs",
    "continuity/": "jobs", "selftest/": "jobs", "storage/": "files", "formats/": "formats", "optimizers/": "optimizers",
    "layout/": "optimizers", "planning/": "optimizers", "model_space/": "optimizers", "job/": "optimizers",
    "": "commands",
}  # fmt: skip


def command(name: str) -> str:
    """Describe a command with usage and options, from argparse."""
    from mcore_ckpt_ext.cli.main import parser_of

    parser = _subparser(parser_of([name]), name)
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=76)
    parts = [f"```text\n{parser.format_usage().strip()}\n```"]
    for group in parser._action_groups:
        rows = [_option_row(action) for action in group._group_actions if action.help != argparse.SUPPRESS]
        if rows:
            title = [] if group.title in ("positional arguments", "options") else [f"{_capital(group.title)}:"]
            parts += [*title, _table(("argument", "meaning"), rows)]
    parts += [parser.epilog] if parser.epilog else []
    return "\n\n".join(parts)


def commands() -> str:
    """Return a row for each command, with a link to its page."""
    from mcore_ckpt_ext.cli.main import COMMANDS

    rows = [(f"[{name}](commands/{name}.md)", f"{_capital(what)}.") for name, what in COMMANDS.items()]
    return _table(("command", "what it does"), rows)


def _subparser(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found: argparse.ArgumentParser = commands.choices[name]
    return found


def _option_row(action: argparse.Action) -> tuple[str, str]:
    values = "|".join(map(str, action.choices)) if action.choices else ""
    value = values or (action.metavar if isinstance(action.metavar, str) else "")
    if action.nargs in ("+", "*"):
        value = f"{value} ..."
    spelled = [f"{flag} {value}".strip() for flag in action.option_strings] or [value or action.dest]
    return ", ".join(f"`{text}`" for text in spelled), action.help or ""


def settings() -> str:
    """Return a row for every environment variable of the package."""
    from mcore_ckpt_ext.settings import SETTINGS

    rows = []
    for setting in SETTINGS:
        is_number = isinstance(setting.default, float)
        shown = f"`{setting.default:g}`" if is_number else f"`{setting.default}`"
        switch: dict[object, str] = {True: "on", False: "off"}  # also of a number that is 0
        default = switch.get(setting.default, shown)
        flag = f"`{setting.flag}`" if setting.argument else ""
        rows.append((f"[`{setting.name}`](#{setting.name.lower()})", setting.meaning, default, flag))
    return _table(("variable", "value and meaning", "not set", "argument of the job that means the same"), rows)


@dataclass(frozen=True)
class Message:
    """An error that the code raises: class, message and hint; `…` stands for inserted values.

    Attributes:
        subject: the page that has it: that of the first prefix in `SUBJECTS` that its module's path starts with.
    """

    error: str
    sentence: str
    hint: str
    subject: str


def error_classes() -> str:
    """Return a row for each class of errors that is raised, with what to do in general."""
    raised = {message.error for message in messages()}
    rows = [(f"`{name}`", meaning, _IN_GENERAL[name]) for name, meaning in _error_classes().items() if name in raised]
    return _table(("class", "meaning", "what to do in general"), rows)


def errors(subject: str) -> str:
    """Return the messages of a subject by the class of the error."""
    by_class: dict[str, set[Message]] = defaultdict(set)
    for message in messages():
        if message.subject == subject:
            by_class[message.error].add(message)
    parts = []
    for name in _error_classes():
        if by_class[name]:
            rows = sorted({(message.sentence, message.hint) for message in by_class[name]}, key=_place)
            parts += [f"## {name}", _table(("message", "hint"), rows)]
    return "\n\n".join(parts)


def _place(row: tuple[str, str]) -> tuple[str, tuple[str, str]]:
    """Order messages by their first word; the row itself decides among equal ones."""
    return row[0].strip("…'\" ").lower(), row


def messages() -> tuple[Message, ...]:
    """Return the messages of all places in the package that create an error."""
    return _messages_of(PACKAGE)


@cache
def _messages_of(package: Path) -> tuple[Message, ...]:
    """Return the messages of a folder's modules; each page has a part of them, and parsing all takes seconds."""
    return tuple(_read_messages(package))


def _read_messages(package: Path) -> Iterator[Message]:
    classes = _error_classes()
    shared = _constants(ast.parse((package / "errors.py").read_text(encoding="utf-8")))
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = shared | _constants(tree)
        module = str(path.relative_to(package))
        subject = next(subject for prefix, subject in SUBJECTS.items() if module.startswith(prefix))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes and node.args:
                sentence = _text(node.args[0], constants)
                hint = next((_text(key.value, constants) for key in node.keywords if key.arg == "hint"), "")
                if sentence.strip(f"{_UNKNOWN} ;:,"):
                    shown = hint.strip() if hint.strip(f"{_UNKNOWN} ") else ""
                    yield Message(node.func.id, sentence, shown, subject)


def _error_classes() -> dict[str, str]:
    """Return the classes of errors.py with the first paragraph of their docstrings."""
    tree = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
    return found


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    pairs = [(node.targets[0], node.value) for node in tree.body if isinstance(node, ast.Assign)]
    return {target.id: value for target, value in pairs if isinstance(target, ast.Name)}


def _text(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """Return the text of a string, as far as it is in the source."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants) if isinstance(node.value, ast.Name) else _UNKNOWN
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, constants) + _text(node.right, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return _text(constants[node.id], {name: value for name, value in constants.items() if name != node.id})
    return _UNKNOWN


def families() -> str:
    """Return a table for each group of families: a row for each file, with its models and their tests."""
    from mcore_ckpt_ext.families.recognition import FAMILIES
    from tests.harness.witnesses import COMPUTES_AS, OF_OWN_CODE, SHOWN

    by_file: dict[str, list[Family]] = defaultdict(list)
    for family in FAMILIES:
        by_file[type(family).__module__].append(family)
    groups: dict[str, list[tuple[str, ...]]] = {title: [] for title, _ in _FAMILY_GROUPS}
    for module, found in by_file.items():
        models = (sys.modules[module].__doc__ or "").partition("\n")[0].rstrip(".")
        types = {family.model_type for family in found}
        layouts = dict.fromkeys(
            layout for shown in SHOWN.values() if shown.model_type in types for layout in shown.layouts + shown.engine
        )
        why = (
            next((shown.why for shown in SHOWN.values() if shown.model_type in types), "")
            or found[0].bridge_only_reason
        )
        layouts |= dict.fromkeys(
            f"{layout} (Megatron-Bridge's model)"
            for shown in SHOWN.values()
            if shown.model_type in types
            for layout in shown.bridge
        )
        equivalents = [f"as `{COMPUTES_AS[one]}`" for one in types & COMPUTES_AS.keys()]
        equivalents += [OF_OWN_CODE[one] for one in types & OF_OWN_CODE.keys()]
        tested = ", ".join([*layouts, *equivalents]) or f"not compared: {why}"
        title = next(title for title, belongs in _FAMILY_GROUPS if belongs(found[0]))
        groups[title].append((models, ", ".join(f"`{family.model_type}`" for family in found), tested))
    head = ("models", "`model_type`", "logits compared under")
    return "\n\n".join(f"### {title}\n\n{_table(head, rows)}" for title, rows in reversed(groups.items()) if rows)


def _has_parameters(*marks: str) -> Callable[[Family], bool]:
    """Return a test for families with a Megatron parameter whose name contains one of the marks."""
    return lambda family: any(mark in str(rule.megatron) for rule in family.rules for mark in marks)


# A family is listed in the first matching group.
_FAMILY_GROUPS: tuple[tuple[str, Callable[[Family], bool]], ...] = (
    ("Trained by Megatron-Bridge only", lambda family: bool(family.bridge_only_reason)),
    ("Linear attention and Mamba", _has_parameters(".in_proj")),
    ("Latent attention", _has_parameters("_kv_down", "_kv_up")),
    ("Mixture of experts", _has_parameters(".experts")),
    ("Dense", lambda family: True),
)


def unsupported() -> str:
    """Return a row for each reason why a model type is not supported."""
    from mcore_ckpt_ext.families.unsupported import NOT_IN_MEGATRON

    by_reason: dict[str, list[str]] = defaultdict(list)
    for model_type, why in NOT_IN_MEGATRON.items():
        by_reason[why].append(f"`{model_type}`")
    return _table(("`model_type`", "why not"), [(", ".join(types), why) for why, types in by_reason.items()])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def _cell(text: str) -> str:
    """Escape Markdown and HTML in the text of a table cell, except in code."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    if len(parts) % 2:
        return "`".join(part if index % 2 else _escaped(part) for index, part in enumerate(parts))
    return _escaped("`".join(parts))


def _escaped(text: str) -> str:
    return text if text.startswith("[") else text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def _capital(text: str | None) -> str:
    return f"{text[0].upper()}{text[1:]}" if text else ""


# The parts by their names; those of a command or a subject have its name behind theirs.
PARTS: dict[str, Callable[..., str]] = {
    "command": command,
    "commands": commands,
    "settings": settings,
    "error_classes": error_classes,
    "errors": errors,
    "families": families,
    "unsupported": unsupported,
}


def with_parts(page: str) -> str:
    """Return the text of a page with its generated parts as the code has them now."""
    return _GENERATED.sub(lambda match: f"{match[1]}\n{part(*filter(None, match.group(2, 3)))}\n\n{match[4]}", page)


def part(name: str, of: str = "") -> str:
    """Return a part: `settings`, `command plan`."""
    return PARTS[name](*filter(None, [of]))


def main() -> None:
    """Write the pages, or print a part."""
    parser = argparse.ArgumentParser(
        description="Write the generated parts into the pages of docs/, or print one part."
    )
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("of", nargs="?", default="", help="command, or subject of errors")
    arguments = parser.parse_args()
    if arguments.part:
        sys.stdout.write(part(arguments.part, arguments.of) + "\n")
        return
    for path in sorted((REPOSITORY / "docs").rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if page != with_parts(page):
            path.write_text(with_parts(page), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    main()
