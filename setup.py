"""What pyproject.toml cannot say: the readme of the package's page, whose links must hold outside of the repository."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HOME = "mcore-ckpt-ext/mcore_ckpt_ext"


def readme() -> str:
    """README.md, where links into the repository are addresses."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->\n*", "", text)
    text = re.sub(r"!\[([^]]*)\]\((?!https?:)", rf"![\1](https://raw.githubusercontent.com/{HOME}/main/", text)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!https?:)", rf"[\1](https://github.com/{HOME}/blob/main/", text)


setup(long_description=readme(), long_description_content_type="text/markdown")
