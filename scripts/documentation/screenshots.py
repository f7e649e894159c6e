"""Takes screenshots of the pages that `mcore-ckpt` writes, with headless Chromium.

python scripts/documentation/screenshots.py [FOLDER]        into docs/pictures, or another folder
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
TIME_LIMIT = 60


@dataclass(frozen=True)
class Shot:
    """A picture: its name, the command that writes the page (fixtures in braces), and the window."""

    name: str
    words: tuple[str, ...]
    width: int = 1200
    height: int = 1500
    is_dark: bool = False


SHOTS = (
    Shot("report.png", ("inspect", "{p01}", "--html"), height=1900),
    Shot("report-dark.png", ("inspect", "{p01}", "--html"), height=1900, is_dark=True),
    Shot("difference.png", ("diff", "{p01}", "{p10}", "--html"), height=900),
)


def browser() -> str | None:
    """Return the path of Chromium; None if it is not installed."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def take(program: str, page: Path, picture: Path, shot: Shot) -> None:
    """Take a screenshot of a page."""
    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1",
        f"--user-data-dir={page.parent / 'profile'}", f"--window-size={shot.width},{shot.height}",
        f"--blink-settings=preferredColorScheme={0 if shot.is_dark else 1}", f"--screenshot={picture}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=TIME_LIMIT)


def main() -> int:
    """Take all screenshots."""
    sys.path[:0] = [str(REPOSITORY)]
    from mcore_ckpt_ext.cli.main import main as command_line
    from tests.harness.checkpoints import FIXTURES, fixture_named

    program = browser()
    if program is None:
        print(f"none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else REPOSITORY / "docs" / "pictures").resolve()
    numbers = {name.partition("_")[0] for name in FIXTURES}
    with tempfile.TemporaryDirectory() as scratch:
        for shot in SHOTS:
            page = Path(scratch) / "page.html"
            words = [
                str(fixture_named(word[1:-1]).run) if word[1:-1] in numbers and word[0] == "{" else word
                for word in shot.words
            ]
            command_line([*words, str(page)])
            # Without the temporary path of the fixture.
            text = page.read_text(encoding="utf-8")
            for number in numbers:
                if f"{{{number}}}" in shot.words:
                    text = text.replace(str(fixture_named(number).run), f"/data/{number}")
            page.write_text(text, encoding="utf-8")
            take(program, page, folder / shot.name, shot)
            print(folder / shot.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
