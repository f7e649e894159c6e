"""Write the JSON Schemas of `--json` to the package and to the documentation.

python scripts/documentation/json_schemas.py        after a command's result has changed; raise its schema number, too
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDERS = (REPOSITORY / "mcore_ckpt_ext/cli/schemas", REPOSITORY / "docs/reference/schemas")


def texts() -> dict[str, str]:
    """Return the text of each schema by file name."""
    from mcore_ckpt_ext.cli.json_schema import RESULTS, schema_of

    return {f"{command}.json": json.dumps(schema_of(command), indent=1) + "\n" for command in RESULTS}


def main() -> int:
    """Write all files."""
    for folder in FOLDERS:
        folder.mkdir(exist_ok=True)
        for name, text in texts().items():
            (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    raise SystemExit(main())
