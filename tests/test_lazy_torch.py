"""Test that commands that read no tensor run without torch, whose import takes longer than they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.checkpoints import FIXTURES, fixture_named

# Of these, samples of tensors are read: what Megatron stored shifted shows in no metadata, nor do remainders; and
# Megatron-Bridge keeps its iteration in tensors.
_READ_SAMPLES = ("p11", "p23", "p47b", "p49")
# As if torch were not installed: whatever imports it fails.
_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from mcore_ckpt_ext.cli.main import main
for path in sys.argv[2:]:
    code = main([sys.argv[1], path, *(["--gpus", "8"] if sys.argv[1] == "plan" else [])])
    assert code == 0, (path, code)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_metadata_is_read_without_torch(command: str) -> None:
    read_samples = (*_READ_SAMPLES, *(("p08c",) if command == "plan" else ()))
    names = [name for name in FIXTURES if name.split("_")[0] not in read_samples]
    folders = [str(fixture_named(name).run) for name in names]
    run(_WITHOUT_TORCH, command, *folders)


def test_an_index_is_read_without_numpy_and_without_the_families() -> None:
    """They take a fifth of the time of `inspect` for an index of 100,000 chunks."""
    run(
        "import sys\n"
        "from mcore_ckpt_ext.cli.main import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'numpy', 'email', 'mcore_ckpt_ext.families.llama'} & sys.modules.keys()",
        "inspect",
        str(fixture_named("p02").run),
    )


@pytest.mark.thorough
def test_commands_for_checkpoints_of_megatron_import_no_families() -> None:
    run(
        "import sys\n"
        "from mcore_ckpt_ext.cli.main import main\n"
        "assert main(['convert', *sys.argv[1:], 'nowhere', '--to', 'torch_dist', '--dry-run']) == 0\n"
        "assert main(['verify', *sys.argv[1:]]) == 0\n"
        "assert main(['diff', *sys.argv[1:], *sys.argv[1:]]) == 0\n"
        "assert 'mcore_ckpt_ext.families.llama' not in sys.modules",
        str(fixture_named("p02").run),
    )


@pytest.mark.parametrize(
    "words", [["--help"], ["inspect", "--help"], ["convert", "--help"], ["verify", "--nonsense"], ["plan"]]
)
def test_help_and_usage_errors_import_neither_torch_nor_numpy(words: list[str]) -> None:
    run(
        "import sys\n"
        "from mcore_ckpt_ext.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()",
        *words,
    )


def run(code: str, *words: str) -> None:
    """Run code in a fresh interpreter; what it prints is shown where it fails."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
