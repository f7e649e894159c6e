"""`mcore-ckpt convert`: write a checkpoint in another format or layout, optimizer included."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

from mcore_ckpt_ext.cli.assignments import ARGUMENT_HELP
from mcore_ckpt_ext.cli.folding import unread_rows
from mcore_ckpt_ext.cli.join import add_join
from mcore_ckpt_ext.cli.json_output import print_result
from mcore_ckpt_ext.cli.options import add_facts, add_weights, options_of
from mcore_ckpt_ext.cli.output import REMARKABLE, Painted, line, message, summarize
from mcore_ckpt_ext.cli.progress import progress_of
from mcore_ckpt_ext.cli.sizes import parse_count, parse_file_size, parse_size
from mcore_ckpt_ext.defaults import DEFAULT_MEMORY, DEFAULT_WORKERS
from mcore_ckpt_ext.errors import UsageError, format_bytes, quantity
from mcore_ckpt_ext.formats.hugging_face.options import DTYPES, EXPORTED_KINDS, QUANTIZATIONS
from mcore_ckpt_ext.formats.target import LAYER_SPECS
from mcore_ckpt_ext.formats.torch_dist.options import LOOPS
from mcore_ckpt_ext.job.facts import FactsOfSource
from mcore_ckpt_ext.targets import TARGETS, Target

if TYPE_CHECKING:
    from mcore_ckpt_ext.communicator import Communicator
    from mcore_ckpt_ext.operations.conversion import Report

_FIELDS = {name: target.options() for name, target in TARGETS.items()}


class _Option(NamedTuple):
    """An option of some targets: the field that it sets, and its flag."""

    field: str
    flag: str
    how: dict[str, Any]

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets with this option, by their names for `--to`."""
        return tuple(name for name, names in _FIELDS.items() if self.field in names)


def _option(field: str, flag: str = "", **how: Any) -> _Option:
    return _Option(field, flag or f"--{field.replace('_', '-')}", how)


def _count(field: str, help: str) -> _Option:
    return _option(field, type=parse_count, metavar="N", help=help)


# Sizes of a layout have Megatron's names.
_OPTIONS = (
    _option("megatron_version", metavar="V", help="Megatron release that will read it (default: the installed one)"),
    _count("tensor_model_parallel_size", "tensor-parallel size of the job that will read it"),
    _count("pipeline_model_parallel_size", "pipeline-parallel size of the job that will read it"),
    _count("virtual_pipeline_model_parallel_size", "model chunks per pipeline rank of the job that will read it"),
    _count("expert_model_parallel_size", "expert-parallel size of the job that will read it"),
    _option(
        "transformer_impl", choices=LAYER_SPECS, help="layer spec of the job that will read it (default: the source's)"
    ),
    _option("loop", "--for", choices=LOOPS, help="training loop that will read it (default: megatron)"),
    _count("vocab_size", "number of tokens: legacy pads the vocabulary for it, hf cuts to it"),
    _option("tokenizer", metavar="PATH", help="folder of a tokenizer, or of a model, whose tokenizer files are copied"),
    _option("dtype", choices=DTYPES, help="dtype of all floating-point tensors (default: as stored)"),
    _option("kind", "--from", choices=EXPORTED_KINDS, help="kind of tensor to export (default: weight)"),
    _option("max_shard_size", type=parse_file_size, metavar="SIZE", help="largest size of a file (default: 5GB)"),
    _option(
        "arguments",
        "--argument",
        action="append",
        metavar="NAME=VALUE ...",
        help=ARGUMENT_HELP,
    ),
    _option(
        "quantize", choices=QUANTIZATIONS, help="quantize the weights of linear layers: fp8 in blocks of 128 x 128"
    ),
    _count("lora_alpha", "alpha of LoRA adapters, if it is missing from the checkpoint"),
    _option("pickled", "--bin", action="store_true", help="write pytorch_model.bin instead of safetensors"),
)


class _ListFamilies(argparse.Action):
    """Print the table of model families instead of a conversion."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    @override
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from mcore_ckpt_ext.cli.family_list import print_families  # the families take 0.1 s to import

        print_families()
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; options of targets are grouped by targets."""
    parser.add_argument(
        "source", metavar="SRC", help="run folder (newest iteration), iteration, Hugging Face, PEFT or canonical folder"
    )
    parser.add_argument("destination", metavar="DST", help="folder to write")
    parser.add_argument("--to", choices=TARGETS, help="format to write; without it, the formats are listed")
    parser.add_argument("--family", metavar="NAME", help="model family, if it is not recognized; or path.py:Name")
    parser.add_argument("--list-families", action=_ListFamilies, help="print the Hugging Face model families, and exit")
    parser.add_argument(
        "--accept-key",
        dest="accept_keys",
        action="append",
        default=[],
        metavar="NAME",
        help="accept a key of a Hugging Face config.json as without effect on what the model computes; may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be written, and write nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted conversion")
    parser.add_argument("--force", action="store_true", help="replace DST")
    parser.add_argument(
        "--accept-lost", action="store_true", help="convert even if elements are missing from the source"
    )
    parser.add_argument(
        "--drop", nargs="+", default=[], metavar="KIND", help="leave out optimizer state that cannot be converted"
    )
    parser.add_argument("--workers", type=parse_count, default=DEFAULT_WORKERS, metavar="N", help="number of threads")
    add_join(parser)
    parser.add_argument(
        "--memory-limit",
        type=parse_size,
        default=DEFAULT_MEMORY,
        metavar="SIZE",
        help="buffer memory of all threads together (default: 1GiB)",
    )
    for targets in sorted({option.targets for option in _OPTIONS}, key=lambda names: (len(names), names)):
        group = parser.add_argument_group(f"only with {_flags_of(targets)}")
        for option in _OPTIONS:
            if option.targets == targets:
                group.add_argument(option.flag, dest=option.field, default=argparse.SUPPRESS, **option.how)
    add_weights(parser)
    parser.add_argument(
        "--merge", metavar="BASE", help="merge the adapters into this model: a Hugging Face folder or a checkpoint"
    )
    add_facts(parser, FactsOfSource)


def run(arguments: argparse.Namespace) -> int:
    """Convert, and report the result."""
    if arguments.to is None and arguments.json:
        raise UsageError("--to is missing: the format to write", expected=f"one of {', '.join(TARGETS)}")
    if arguments.to is None:
        return _explain_targets()
    from mcore_ckpt_ext.cli.processes import command_team

    target = _target(arguments)
    with command_team(join=arguments.join) as team:
        report = _convert(arguments, target, team)
        if team.rank == 0 and arguments.json:
            print_result("convert", report, 0)
        elif team.rank == 0:
            for text in _dry_run_lines(report) if arguments.dry_run else _result_lines(report):
                line(text)
            for row in unread_rows(report.account.not_looked_at):
                line(f"{'copied unchanged' if row.carried else 'left out'}: {row.keys}, {row.size}: {row.why}")
            for note in report.notes:
                line(Painted(f"note: {summarize(note)}", REMARKABLE))
    return 0


def _explain_targets() -> int:
    """List the targets, and return the exit code of wrong usage."""
    message("error: --to is missing: the format to write")
    width = max(map(len, TARGETS))
    for name, target in TARGETS.items():
        about = (target.__doc__ or "").partition("\n")[0].replace("`", "")
        message(f"  --to {name.ljust(width)}  {about}")
    message("hint: mcore-ckpt convert --help")
    return 2


def _target(arguments: argparse.Namespace) -> Target:
    """Return the target of the conversion.

    Raises:
        UsageError: an option belongs to other targets.
    """
    given = [option for option in _OPTIONS if hasattr(arguments, option.field)]
    for option in given:
        if arguments.to not in option.targets:
            raise UsageError(
                f"{option.flag} has no meaning for --to {arguments.to}",
                expected=f"it belongs to {_flags_of(option.targets)}",
                hint="leave it out, or choose another target",
            )
    chosen = {option.field: getattr(arguments, option.field) for option in given}
    return TARGETS[arguments.to](**chosen)


def _flags_of(targets: tuple[str, ...]) -> str:
    """Return targets as text: `--to a`, or `--to a or b`."""
    *others, last = targets
    return f"--to {', '.join(others)} or {last}" if others else f"--to {last}"


def _convert(arguments: argparse.Namespace, target: Target, team: Communicator) -> Report:
    from mcore_ckpt_ext.operations.conversion import convert
    from mcore_ckpt_ext.operations.options import ConversionOptions

    options = options_of(ConversionOptions, arguments)
    return convert(arguments.source, arguments.destination, target, options, progress=progress_of(team), team=team)


def _dry_run_lines(report: Report) -> Iterator[str]:
    yield f"would write {report.destination}: {quantity(report.files, 'file')}, {format_bytes(report.bytes_written)}"
    memory = format_bytes(report.peak_memory)
    yield f"would read {format_bytes(report.bytes_read)} of tensors, through {memory} of memory"


def _result_lines(report: Report) -> Iterator[str]:
    size = format_bytes(report.bytes_written)
    yield f"wrote {report.destination}: {quantity(report.files, 'file')}, {size} in {report.seconds:.1f} s"
    if report.proven_elements:
        yield f"verified: {quantity(report.proven_elements, 'master')} {report.how}"
    if report.lost:
        lost = sum(report.lost.values())
        parameters = quantity(len(report.lost), "parameter")
        yield f"LOST in the source: {quantity(lost, 'element')} of {parameters}; their moments are zero"
