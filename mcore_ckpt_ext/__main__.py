"""Run the command line: `python -m mcore_ckpt_ext` is the same as `mcore-ckpt`."""

import os
import sys

# `-m` puts the current folder, which may be untrusted, first in `sys.path`. Import nothing from there: before this
# line, only import modules that Python itself has imported by now.
if sys.path[:1] in ([""], [os.getcwd()]) and not getattr(sys.flags, "safe_path", False):  # noqa: PTH109 - see above
    del sys.path[0]

from mcore_ckpt_ext.cli.main import run_as_process

if __name__ == "__main__":
    run_as_process()
