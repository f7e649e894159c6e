"""`mcore-ckpt convert`: another format or layout, optimizer included."""

from __future__ import annotations

import argparse
import sys

from mcore_ckpt_ext.cli.progress import Progress
from mcore_ckpt_ext.cli.sizes import parse_file_size, parse_size, readable
from mcore_ckpt_ext.cli.together import the_team
from mcore_ckpt_ext.formats.huggingface import LOCAL, TRANSFORMER_ENGINE
from mcore_ckpt_ext.formats.huggingface_target import DTYPES, SHARD_BYTES
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.offline.conversion import DEFAULT_MEMORY, DEFAULT_WORKERS, Report, convert
from mcore_ckpt_ext.offline.estimate import disk_rate
from mcore_ckpt_ext.offline.targets import FORMATS
from mcore_ckpt_ext.offline.team import Team

HELP = "write a checkpoint in another format or layout, optimizer included"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options; layouts are spelt as Megatron spells them."""
    parser.add_argument("source", metavar="SRC", help="run folder, iteration folder, Hugging Face or canonical folder")
    parser.add_argument("destination", metavar="DST", help="the folder to make")
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format to write")
    parser.add_argument("--megatron-version", help="the version that will read it (default: the installed)")
    for name, what in (
        ("tensor-model-parallel-size", "tensor-parallel ranks"),
        ("pipeline-model-parallel-size", "pipeline ranks"),
        ("virtual-pipeline-model-parallel-size", "model chunks a pipeline rank"),
        ("expert-model-parallel-size", "expert-parallel ranks"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} of the job that will read (legacy)")
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="the tokenizer's size, to pad as Megatron pads, or to cut (hf)"
    )
    parser.add_argument(
        "--transformer-impl", choices=(TRANSFORMER_ENGINE, LOCAL), default=TRANSFORMER_ENGINE,
        help="of the job that will read what comes from Hugging Face",
    )  # fmt: skip
    parser.add_argument("--family", metavar="NAME", help="of the model, where it is not recognised; or path.py:Name")
    parser.add_argument("--tokenizer", metavar="PATH", help="folder of a tokenizer whose files are copied (hf)")
    parser.add_argument("--dtype", choices=DTYPES, help="of all floating-point tensors (hf; default: as stored)")
    parser.add_argument(
        "--from", dest="kind", choices=(WEIGHT, FP32_PARAM), default=WEIGHT, help="what to export (hf)"
    )
    parser.add_argument(
        "--max-shard-size", type=parse_file_size, default=SHARD_BYTES, metavar="SIZE",
        help="of a file of weights (hf; default 5GB)",
    )  # fmt: skip
    parser.add_argument("--bin", action="store_true", help="pytorch_model.bin instead of safetensors (hf)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted conversion")
    parser.add_argument("--force", action="store_true", help="replace DST")
    parser.add_argument("--accept-lost", action="store_true", help="convert although the source lacks elements")
    parser.add_argument("--workers", type=int, default=DEFAULT_WORKERS, metavar="N", help="threads")
    parser.add_argument("--memory-limit", type=parse_size, default=DEFAULT_MEMORY, metavar="SIZE", help="default 1GiB")


def run(arguments: argparse.Namespace) -> int:
    """Convert and say what was done."""
    with the_team() as team:
        report = _converted(arguments, team)
        if team.rank == 0:
            lines = _planned(report) if arguments.dry_run else _done(report)
            sys.stdout.write("\n".join([*lines, *(f"note: {note}" for note in report.notes)]) + "\n")
    return 0


def _converted(arguments: argparse.Namespace, team: Team) -> Report:
    return convert(
        arguments.source,
        arguments.destination,
        to=arguments.to,
        megatron_version=arguments.megatron_version,
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=arguments.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
        vocab_size=arguments.vocab_size,
        transformer_impl=arguments.transformer_impl,
        family=arguments.family,
        tokenizer=arguments.tokenizer,
        dtype=arguments.dtype,
        kind=arguments.kind,
        max_shard_size=arguments.max_shard_size,
        pickled=arguments.bin,
        workers=arguments.workers,
        memory_limit=arguments.memory_limit,
        force=arguments.force,
        resume=arguments.resume,
        dry_run=arguments.dry_run,
        accept_lost=arguments.accept_lost,
        progress=Progress() if team.rank == 0 else lambda done, total: None,
        team=team,
    )


def _planned(report: Report) -> list[str]:
    rate = disk_rate(report.destination)
    return [
        f"would write {report.destination}: {report.files} files, {readable(report.bytes_written)}",
        f"would read {readable(report.bytes_read)} of tensors, through {readable(report.peak_memory)} of memory",
        f"about {report.bytes_written / rate:.0f} s at the {readable(int(rate))}/s that this disk just wrote",
    ]


def _done(report: Report) -> list[str]:
    lines = [
        f"wrote {report.destination}: {report.files} files, {readable(report.bytes_written)} in {report.seconds:.1f} s",
    ]
    if report.proven_elements:
        lines.append(f"proven: {report.proven_elements:,} masters round to their weights")
    if report.lost:
        lost = sum(report.lost.values())
        lines.append(f"LOST in the source: {lost:,} elements of {len(report.lost)} parameters; their moments are zero")
    return lines
