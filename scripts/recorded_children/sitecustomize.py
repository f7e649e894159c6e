"""Records which functions of the package a process enters that a test has started: for `reached_functions.py`.

Python imports this module when it starts, since the folder is on PYTHONPATH. A line of JSON is written for each
function when it is first entered, as such a process may end in any way.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import CodeType

_PACKAGE = f"{Path(__file__).parents[2] / 'mcore_ckpt_ext'}/"


def write_entered(code: CodeType) -> None:
    """Write down that the running test, whose name pytest keeps in the environment, enters a function."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and code.co_filename.startswith(_PACKAGE):
        path = "mcore_ckpt_ext/" + code.co_filename.removeprefix(_PACKAGE)
        line = json.dumps({"test": test, "entered": [(path, code.co_qualname)]})
        with Path(os.environ["REACHED_FUNCTIONS"], f"{os.getpid()}.jsonl").open("a") as file:
            file.write(line + "\n")


def _enter(code: CodeType, offset: int) -> object:
    write_entered(code)
    return sys.monitoring.DISABLE


# A process of pytest itself starts before the first test.
if "PYTEST_CURRENT_TEST" in os.environ and "REACHED_FUNCTIONS" in os.environ and sys.version_info >= (3, 12):
    sys.monitoring.use_tool_id(sys.monitoring.PROFILER_ID, __name__)
    sys.monitoring.register_callback(sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START, _enter)
    sys.monitoring.set_events(sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START)
