"""A hook of MkDocs that replaces marks in the text of every page.

<!-- generated: settings -->    what `generated.py` makes of the code
<!-- file: CHANGELOG.md -->     a file of the repository's root

In the HTML, each command-line flag becomes a separate element, which the style sheet keeps on one line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def on_config(*_: Any, **__: Any) -> None:
    """Make the repository importable: MkDocs restores `sys.path` once it has run this file."""
    sys.path[:0] = [path for path in (str(REPOSITORY), str(REPOSITORY / "scripts")) if path not in sys.path]


on_config()
from documentation.generated import PARTS  # noqa: E402 - MkDocs runs this file alone, outside its package

_GENERATED = re.compile(r"<!-- generated: ([\w ]+) -->")
_FILE = re.compile(r"<!-- file: ([\w./]+) -->")
# `--name` in text, not in a tag.
_FLAG = re.compile(r"(?<![\w-])(--[a-z][\w-]*)(?=[^<>]*<)")
# Files of the root link to each other by name; on the site they are pages.
_PAGES = {"SECURITY.md": "security.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks in the text of a page."""
    markdown = _FILE.sub(lambda match: _file(match[1]), markdown)
    return _GENERATED.sub(lambda match: PARTS[match[1]](), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark the flags in the HTML of a page."""
    return _FLAG.sub(r'<span class="flag">\1</span>', html)


def _file(name: str) -> str:
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    text = text.replace("](docs/project/", "](").replace("](docs/", "](../")
    return re.sub(r"\]\(([A-Z]+\.md)\)", lambda match: f"]({_PAGES[match[1]]})", text)
