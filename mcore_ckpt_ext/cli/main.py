"""Entry point of the command line: the table of commands, and exit codes for errors."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from typing_extensions import override

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.assignments import repeat_options
from mcore_ckpt_ext.cli.completion import SHELLS, completion_script
from mcore_ckpt_ext.cli.join import reports_errors
from mcore_ckpt_ext.cli.json_output import print_error, wants_json
from mcore_ckpt_ext.cli.other_checkpoint import mention_non_persistent
from mcore_ckpt_ext.cli.output import OutputError, error_message, flush_output, line, message
from mcore_ckpt_ext.cli.torch_plugins import explain_import_failures
from mcore_ckpt_ext.errors import CheckpointError, StorageError, UsageError, io_hint, shorten

# Each command is a module of this package with `add_arguments(parser)` and `run(arguments) -> int`. It is imported when
# it is called, so that `--help` does not import torch.
COMMANDS = {
    "inspect": "show what is in a checkpoint: layout, format, version, sizes, files, what can resume it",
    "convert": "write a checkpoint in another format or layout, optimizer included",
    "plan": "list the layouts for a number of GPUs that can resume a checkpoint, and what each needs",
    "verify": "check that a checkpoint is complete and intact, and that master weights match weights",
    "diff": "compare two checkpoints of any formats and layouts, bit by bit",
    "doctor": "check the installation: versions, settings, hooks",
    "selftest": "train, save and resume small models with the Megatron and the GPUs of this machine",
}


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises errors as `UsageError`, without printing the usage.

    It accepts no abbreviated options: a later option that begins alike would change what a script does.
    """

    def __init__(self, **keywords: Any) -> None:
        """Create the parser; for the keywords see `argparse.ArgumentParser`."""
        super().__init__(**keywords, allow_abbrev=False)

    @override
    def error(self, message: str) -> NoReturn:
        """Refuse a command line.

        Raises:
            UsageError: always.
        """
        raise UsageError(message, hint=f"{self.prog} --help")


_COMPLETION = "--print-completion"

DONE = 0
UNEQUAL = 1
UNUSABLE = 2
INTERRUPTED = 130
"""Exit codes: done or equal; verified unequal, incomplete or corrupt; wrong usage or unreadable input; Ctrl-C."""
_CREATED_BEFORE_COLLECTION = 50_000


def run_as_process() -> NoReturn:
    """Run a command, and end the process with its exit code.

    Exit handlers run, but Python does not unload imported modules. For torch, unloading takes 0.5 s of processor time
    and 140 MiB of memory, because destructors of CUDA's libraries touch unused pages
    (benchmarks/commands.py, torch 2.13).

    Most objects that imports and plans create live as long as the process. With Python's thresholds, the garbage
    collector would scan them again and again, in a sixth of the time to import torch.
    """
    gc.set_threshold(_CREATED_BEFORE_COLLECTION)
    code = main()
    with contextlib.suppress(OSError, ValueError):  # Python itself reports a stream that cannot be flushed
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)
    raise SystemExit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if word in COMMANDS), "")
    try:
        if words[:1] == [_COMPLETION]:
            return _completion(words)
        with explain_import_failures():
            arguments, unknown = parser_of(words).parse_known_args(repeat_options(words))
            if unknown:
                is_option = unknown[0].startswith("-")
                raise UsageError(f"there is no such {'option' if is_option else 'argument'}", found=" ".join(unknown))
            for name in ("path", "source", "a", "b"):
                if path := getattr(arguments, name, None):
                    mention_non_persistent(path)
            code: int = import_module(f"mcore_ckpt_ext.cli.{arguments.command}").run(arguments)
        flush_output()
    except OutputError as error:
        return _end_without_output(error, DONE)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - Python's own exit code, 1, would mean "unequal"
        return _end(error, command, as_json=wants_json(words) and reports_errors(words, os.environ))
    return code


def _end(error: BaseException, command: str, *, as_json: bool) -> int:
    """Report the error that ended a command on stderr, and on stdout as JSON; return the exit code."""
    code = UNUSABLE
    kind = type(error).__name__
    details: dict[str, str] = {}
    is_bug = False
    if isinstance(error, CheckpointError):
        hint = {"hint": f"mcore-ckpt {command} --help"} if command and isinstance(error, UsageError) else {}
        sentence = error.message
        details = {**error.details, **({} if "hint" in error.details else hint)}
    elif isinstance(error, OSError):
        kind = StorageError.__name__
        sentence = "a file or folder cannot be used"
        details = {"found": shorten(error.strerror or str(error))}
        details |= {"where": shorten(os.fsdecode(error.filename))} if error.filename else {}
        details["hint"] = io_hint(error)
    elif isinstance(error, MemoryError):
        sentence = "there is not enough memory"
        details = {"hint": "use fewer threads: --workers 1"}
    elif isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
        sentence = "interrupted"
    else:
        sentence = "this is a bug in mcore_ckpt_ext, please report it with what stderr shows"
        is_bug = True
        for text in ("this is a bug in mcore_ckpt_ext, please report it:", *traceback.format_exc().splitlines()):
            message(text)
    if code == INTERRUPTED:
        message(sentence)
    elif not is_bug:
        error_message(sentence, details)
    try:
        if as_json:
            print_error(command, code, kind, sentence, details)
            flush_output()
    except OutputError as unwritten:
        return _end_without_output(unwritten, code)
    return code


def _end_without_output(error: OutputError, code: int) -> int:
    """Return the exit code of a command whose output cannot be written; `code` if its reader has left.

    A pipe's reader, such as `head`, may close it. Python must not try to write again at exit.
    """
    if sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):  # a stream without a file has nothing to flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error.cause, BrokenPipeError):
        return code
    error_message("stdout cannot be written", {"found": error.cause.strerror or str(error.cause)})
    return UNUSABLE


def _completion(words: Sequence[str]) -> int:
    """Print the completion script of a shell."""
    parser = parser_of(words, every=True)
    shell = parser.parse_args([*words, "doctor"]).print_completion  # any command, because the parser requires one
    for text in completion_script(parser, shell).splitlines():
        line(text)
    return DONE


def parser_of(words: Sequence[str], *, every: bool = False) -> argparse.ArgumentParser:
    """Return the parser, with the options of the called command only, or of every command."""
    parser = _Parser(
        prog="mcore-ckpt",
        description="Inspect, verify, compare and convert Megatron checkpoints, without Megatron and without a GPU.",
        epilog="exit codes: 0 done or equal; 1 unequal, incomplete or corrupt; 2 wrong usage or unreadable input",
    )
    parser.add_argument(_COMPLETION, choices=SHELLS, help="print a shell completion script (needs shtab)")
    parser.add_argument("--version", action="version", version=f"mcore-ckpt {mcore_ckpt_ext.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in words[:1] or every:
            import_module(f"mcore_ckpt_ext.cli.{name}").add_arguments(command)
    return parser
