"""A hook of MkDocs that replaces a mark in the text of every page.

<!-- file: CHANGELOG.md -->     a file of the repository's root

In the HTML, each command-line flag becomes a separate element, which the style sheet keeps on one line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


_FILE = re.compile(r"<!-- file: ([\w./]+) -->")
# `--name` in text, not in a tag.
_FLAG = re.compile(r"(?<![\w-])(--[a-z][\w-]*)(?=[^<>]*<)")
# Files of the root link to each other by name; on the site they are pages.
_PAGES = {"SECURITY.md": "security.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks in the text of a page."""
    return _FILE.sub(lambda match: _file(match[1]), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark the flags in the HTML of a page."""
    return _FLAG.sub(r'<span class="flag">\1</span>', html)


def _file(name: str) -> str:
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    text = text.replace("](docs/project/", "](").replace("](docs/", "](../")
    return re.sub(r"\]\(([A-Z]+\.md)\)", lambda match: f"]({_PAGES[match[1]]})", text)
