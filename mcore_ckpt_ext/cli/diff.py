"""`mcore-ckpt diff`: compare two checkpoints of any formats and layouts, bit by bit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from mcore_ckpt_ext.cli.folding import unread_rows
from mcore_ckpt_ext.cli.join import add_join
from mcore_ckpt_ext.cli.options import add_facts, add_weights, options_of
from mcore_ckpt_ext.cli.output import BAD, GOOD, REMARKABLE, Painted, heading, line, table
from mcore_ckpt_ext.cli.page import check_page_file, comparison_page
from mcore_ckpt_ext.cli.progress import progress_of
from mcore_ckpt_ext.cli.report import report
from mcore_ckpt_ext.cli.sizes import parse_count
from mcore_ckpt_ext.defaults import DEFAULT_WORKERS
from mcore_ckpt_ext.errors import join_some, quantity
from mcore_ckpt_ext.model_space.tensors import KINDS
from mcore_ckpt_ext.storage.paths import as_path

if TYPE_CHECKING:
    from mcore_ckpt_ext.operations.comparison_result import Comparison, KindComparison, TensorDifference

_SHOWN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="run, iteration, Hugging Face or canonical folder")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help=f"compare only these: {', '.join(KINDS)}")
    parser.add_argument("--tensors-only", action="store_true", help="leave settings out of the verdict and exit code")
    parser.add_argument(
        "--family", metavar="NAME", help="model family of a Hugging Face folder, if it is not recognized"
    )
    parser.add_argument("--html", metavar="FILE", type=as_path, help="also write a self-contained page with pictures")
    parser.add_argument("--all", action="store_true", help="list every difference")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--workers", type=parse_count, default=DEFAULT_WORKERS, metavar="N", help="number of threads")
    parser.epilog = (
        "Equal means bit by bit: NaNs with the same bits are equal, 0.0 and -0.0 are not; and that a resume takes up "
        "the same settings, unless --kinds or --tensors-only is given, or one of the two has no optimizer."
    )
    add_join(parser)
    add_weights(parser)
    add_facts(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare, and report the differences."""
    from mcore_ckpt_ext.cli.processes import command_team
    from mcore_ckpt_ext.operations.comparison import compare
    from mcore_ckpt_ext.operations.options import ComparisonOptions

    if arguments.html is not None:
        check_page_file(arguments.html)
    with command_team(join=arguments.join) as team:
        options = options_of(ComparisonOptions, arguments, pictures=arguments.html is not None)
        comparison = compare(arguments.a, arguments.b, options, progress=progress_of(team), team=team)
        exit_code = 0 if comparison.equal else 1
        if team.rank == 0:
            show = partial(_show, most=None if arguments.all else _SHOWN)
            page = partial(comparison_page, verdict=_verdict(comparison))
            report(arguments, "diff", comparison, page=page, show=show, exit_code=exit_code)
    return exit_code


def _show(comparison: Comparison, most: int | None) -> None:
    table([("A", comparison.a), ("B", comparison.b)])
    heading("metadata")
    facts = ((fact, "" if fact.a == fact.b else Painted("differs", REMARKABLE)) for fact in comparison.facts)
    table([(fact.what, fact.a, fact.b, verdict) for fact, verdict in facts], ("", "A", "B"))
    heading("tensors")
    verdicts = [(kind, Painted(_kind_verdict(kind), GOOD if kind.equal else BAD)) for kind in comparison.kinds]
    rows = [(kind.kind, kind.compared, f"{kind.elements:,}", verdict) for kind, verdict in verdicts]
    table(rows, ("", "compared", "elements", ""), right=[1, 2])
    for kind in comparison.kinds:
        for name in (*kind.only_in_a[:most], *kind.only_in_b[:most]):
            line(f"  only in {'A' if name in kind.only_in_a else 'B'}: {kind.kind} {name}")
        for tensor in kind.different[:most]:
            line(f"  {tensor.kind} {tensor.name}: {'; '.join(_differences(tensor))}")
        more = sum(len(names[most:]) for names in (kind.only_in_a, kind.only_in_b, kind.different) if most)
        if more:
            line(f"  and {more:,} more of {kind.kind}; --all lists them")
    for side, account in (("A", comparison.account_a), ("B", comparison.account_b)):
        for row in unread_rows(account.not_looked_at):
            line(f"  not compared: {row.keys} of {side}, {row.size}: {row.why}")
    for side, copies in (("A", comparison.differing_copies_a), ("B", comparison.differing_copies_b)):
        if copies:
            from mcore_ckpt_ext.operations.replicas import differing_copies_note

            line(f"  in {side}: {differing_copies_note(copies, len(copies))}")
    _show_settings(comparison)
    line()
    line(Painted(_verdict(comparison), GOOD if comparison.equal else BAD))


def _show_settings(comparison: Comparison) -> None:
    if not comparison.settings:
        return
    heading("settings")
    differing = [setting for setting in comparison.settings if not setting.equal]
    judged = "" if comparison.settings_equal is not None else ", not part of the verdict"
    line(f"  {len(comparison.settings)} compared, {len(differing) or 'none'} different{judged}")
    table([(setting.name, setting.a, setting.b) for setting in differing], ("", "A", "B") if differing else ())


def _verdict(comparison: Comparison) -> str:
    if comparison.equal:
        equal = "equal in every bit" if comparison.settings_equal is None else "equal in every bit, and in all settings"
        sides = (("A", comparison.account_a.sentence), ("B", comparison.account_b.sentence))
        return "; ".join((equal, *(f"of {side} {words}" for side, words in sides if words)))
    if comparison.tensors_equal:
        names = [setting.name for setting in comparison.settings if not setting.equal]
        return f"DIFFERENT SETTINGS, tensors equal in every bit: {join_some(names)}"
    if not all(kind.equal for kind in comparison.kinds):
        return "DIFFERENT"
    if comparison.missed:
        keys = quantity(comparison.missed, "key was", "keys were")
        return f"NOT KNOWN TO BE EQUAL: what was compared is equal in every bit, {keys} not compared"
    return "NOT KNOWN TO BE EQUAL: the first copies are equal in every bit, but replicas within one checkpoint differ"


def _kind_verdict(kind: KindComparison) -> str:
    if kind.equal:
        return "equal"
    parts = ((kind.only_in_a, "only in A"), (kind.only_in_b, "only in B"), (kind.different, "different"))
    return ", ".join(f"{len(names)} {label}" for names, label in parts if names)


def _differ(tensor: TensorDifference) -> str:
    elements = f"of {quantity(tensor.elements, 'element')}"
    return quantity(tensor.different, f"{elements} differs", f"{elements} differ")


def _differences(tensor: TensorDifference) -> Iterator[str]:
    if tensor.problem:
        yield f"cannot be compared: {tensor.problem}"
    if tensor.shapes[0] != tensor.shapes[1]:
        yield f"shape {tensor.shapes[0]} against {tensor.shapes[1]}"
    if tensor.dtypes[0] != tensor.dtypes[1]:
        yield f"{tensor.dtypes[0]} against {tensor.dtypes[1]}"
    if tensor.padding is not None:
        zero = f"{quantity(tensor.padding.nonzero, 'element')} not zero" if tensor.padding.nonzero else "all zero"
        yield f"{quantity(tensor.padding.rows, 'row more', 'rows more')} in {tensor.padding.only_in}, {zero}"
        yield f"{_differ(tensor)}, of those that both have"
    elif tensor.different:
        yield _differ(tensor)
    if tensor.different:
        if tensor.largest:
            yield f"by at most {tensor.largest:g}"
        if tensor.signed_zeros:
            yield f"{tensor.signed_zeros:,} of them only in the sign of zero"
    if tensor.first is not None:
        index, a, b = tensor.first
        yield f"the first at {index}: {a} against {b}"
