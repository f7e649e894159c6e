"""How the ranks of an elastic job end: with which exit code, and what torchrun prints about it.

An agent goes on if a worker fails, and ends if all its workers succeed (`SimpleElasticAgent._invoke_run`,
torch/distributed/elastic/agent/server/api.py, torch 2.13).
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from mcore_ckpt_ext.errors import CheckpointError, format_error
from mcore_ckpt_ext.patching.singletons import PROCESS

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
OTHERS_LEAVE = 75
"""Exit code (EX_TEMPFAIL) of ranks that go on after a job was saved because of a signal to other nodes."""
_FIRST_OF_ALL = 1000


class Ending:
    """How this process ends.

    Attributes:
        code: the exit code that `sys.exit` was called with; None before.
        handler: Megatron's handler, if it has seen that some rank got a signal.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self.handler: Any = None
        self._is_watched = False

    def watch(self) -> None:
        """Observe the end of this process; a second call changes nothing."""
        if self._is_watched:
            return
        self._is_watched = True
        sys.exit = self._exit(sys.exit)
        sys.excepthook = _record(sys.excepthook)

    def _exit(self, original: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(original)
        def leave(status: Any = None, /) -> NoReturn:
            code = self.code_for(status)
            self.code = code
            original(status if code == _code_of(status) else code)

        return leave

    def code_for(self, status: object) -> int:
        """Return the exit code for what `sys.exit` is called with.

        If other nodes leave, and this rank got no signal, it must fail: its agent then starts it again. Otherwise its
        agent takes the end of the job for success.
        """
        code = _code_of(status)
        left_by_others = self.handler is not None and not self.handler._signal_received
        return OTHERS_LEAVE if code == 0 and left_by_others else code

    def current_code(self) -> int:
        """Return the exit code of this process, which is ending."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit):
            return _code_of(error.code)
        if self.code is not None:
            return self.code
        return 0 if error is None else 1

    def call_at_end(self, call: Callable[[int], None]) -> None:
        """Call a function with the exit code when this process ends, a child of `multiprocessing` or not."""
        Finalize(None, lambda: call(self.current_code()), exitpriority=_FIRST_OF_ALL)


def _code_of(status: object) -> int:
    if status is None:
        return 0
    return status if isinstance(status, int) else 1


def _record(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `excepthook` that also writes what ends this process to torchrun's file of errors."""

    @functools.wraps(original)
    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        record(error)
        return original(kind, error, trace)

    return excepthook


def record(error: BaseException) -> None:
    """Write an error to the agent's file, in the form of torch's `ErrorHandler.record_exception`.

    The agent prints `py_callstack` of the first rank that failed; of a refusal that is the reason alone.
    Source: torch/distributed/elastic/multiprocessing/errors, torch 2.13.
    """
    name = os.environ.get(ERROR_FILE)
    if not name or Path(name).exists():
        return
    is_own = isinstance(error, CheckpointError)
    text = format_error(error) if is_own else "".join(traceback.format_exception(error))
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    try:
        Path(name).write_text(json.dumps({"message": message}))
    except OSError:  # the reason is printed, too
        return


def wrap_signals_received(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `signals_received` that remembers that some rank got a signal."""

    @functools.wraps(original)
    def signals_received(self: Any, *positional: Any, **keywords: Any) -> Any:
        received = original(self, *positional, **keywords)
        if any(received):
            PROCESS.one(Ending).handler = self
        return received

    return signals_received
