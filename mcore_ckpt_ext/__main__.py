"""`python -m mcore_ckpt_ext` is `mcore-ckpt`."""

import sys
from pathlib import Path

# `-m` puts the current folder first, which may be a stranger's: nothing is imported from there.
if sys.path[:1] in ([""], [str(Path.cwd())]) and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

from mcore_ckpt_ext.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
