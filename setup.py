"""What pyproject.toml cannot say: the readme of the package's page, and what an editable installation copies."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

AUTOLOAD = "mcore_ckpt_ext_autoload.py"


class BuildPython(build_py):
    """Copies the module that torch loads, even for an editable installation.

    An editable installation only names the folder of its sources. Once that folder is moved or deleted, the entry point
    in the metadata would name a module that nobody finds, and `import torch` would fail in every program of the
    environment. As a file in site-packages the module is found, and reports the missing package.
    """

    def run(self) -> None:
        """Build; setuptools has `install_lib` name the content of the wheel (setuptools/command/editable_wheel.py,
        `_configure_build`, 77 to 84).
        """
        super().run()
        if self.editable_mode:
            self.copy_file(AUTOLOAD, self.get_finalized_command("install").install_lib)


def readme() -> str:
    """README.md, where links into the repository are addresses."""
    folder = Path(__file__).parent
    text = (folder / "README.md").read_text(encoding="utf-8")
    project = (folder / "pyproject.toml").read_text(encoding="utf-8")
    home = re.search(r'^Homepage = "https://github.com/(.*)"$', project, re.MULTILINE)[1]
    text = re.sub(r"<!--.*?-->\n*", "", text)
    text = re.sub(r"!\[([^]]*)\]\((?!https?:)", rf"![\1](https://raw.githubusercontent.com/{home}/main/", text)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!https?:)", rf"[\1](https://github.com/{home}/blob/main/", text)


setup(cmdclass={"build_py": BuildPython}, long_description=readme(), long_description_content_type="text/markdown")
