"""Measures `verify` and `diff` of Hugging Face folders, and the memory that a conversion of many tensors takes.

    python benchmarks/huggingface_commands.py FOLDER [--runs 3] [--tensors 100000]

Makes a Llama of 4.4 GB in bf16, and the same model in other files. In turn, warm and cold: `verify`, against
`sha256sum` of the same files, and `diff` of the two folders, against `cmp` of one with a copy of it. Then a Llama of
narrow layers with so many tensors, which is converted to torch_dist, back, and compared, for the peak memory of each.
Whole commands, from prompt to prompt, as in `commands.py`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from command_line import parser_of
from commands import IMPORTS, READY, Measured, Results, table

_COMMAND = [sys.executable, "-m", "mcore_ckpt_ext"]
_IMPORT_ALONE = [sys.executable, "-c", "import gc, os; gc.disable(); import torch; os._exit(0)"]
_OF_LAYER = 9
_LARGE = {"layers": 24, "hidden": 2560, "feed_forward": 8192, "vocabulary": 32000}
_NARROW = {"hidden": 64, "feed_forward": 64, "vocabulary": 128}


def _make(folder: Path, **sizes: int) -> None:
    """Make a model in a process of its own: the peak memory of a child begins with its parent's."""
    program = f"import huggingface, pathlib; huggingface.make(pathlib.Path({str(folder.resolve())!r}), **{sizes})"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, check=True)


def run_large(folder: Path, runs: int) -> Results:
    """Run `verify` and `diff` with their references, and return the results."""
    one, other, copy = (folder / name for name in ("hf", "other_files", "copy"))
    _make(one, **_LARGE)
    environment = dict(os.environ)
    for source, to, target in ((one, folder / "run", "torch_dist"), (folder / "run", other, "hf")):
        size = ["--max-shard-size", "1GB"] if target == "hf" else []
        Measured().run([*_COMMAND, "convert", str(source), str(to), "--to", target, *size], environment)
    shutil.rmtree(folder / "run")
    shutil.copytree(one, copy)
    files = shlex.join(str(path) for path in sorted(one.glob("*.safetensors")))
    compare = f"for file in {files}; do cmp $file {shlex.quote(str(copy))}/$(basename $file) || exit 1; done"
    commands = {
        IMPORTS: (_IMPORT_ALONE, ()),
        "verify": ([*_COMMAND, "verify", str(one)], (one,)),
        "verify: sha256sum": (["sh", "-c", f"sha256sum {files}"], (one,)),
        "diff": ([*_COMMAND, "diff", str(one), str(other)], (one, other)),
        "diff: cmp": (["sh", "-c", compare], (one, copy)),
    }
    results: Results = {}
    for _ in range(runs):
        for state, prepare in READY.items():
            for name, (command, read) in commands.items():
                for path in read:
                    prepare(path)
                results.setdefault((name, state), Measured()).run(command, environment)
    return results


def run_narrow(folder: Path, tensors: int) -> Results:
    """Convert a model of many tensors there and back, compare, and return the results."""
    source, run, back = (folder / name for name in ("narrow", "narrow_run", "narrow_back"))
    _make(source, layers=tensors // _OF_LAYER, **_NARROW)
    commands = {
        IMPORTS: _IMPORT_ALONE,
        f"convert --to torch_dist, {tensors:,} tensors": [
            *_COMMAND,
            "convert",
            str(source),
            str(run),
            "--to",
            "torch_dist",
        ],
        f"convert --to hf, {tensors:,} tensors": [*_COMMAND, "convert", str(run), str(back), "--to", "hf"],
        f"verify, {tensors:,} tensors": [*_COMMAND, "verify", str(back)],
        f"diff, {tensors:,} tensors": [*_COMMAND, "diff", str(source), str(back)],
    }
    results: Results = {}
    for name, command in commands.items():
        results.setdefault((name, "warm"), Measured()).run(command, dict(os.environ))
    return results


def main() -> None:
    """Measure, and print both tables."""
    options = parser_of(__doc__, runs=3, tensors=100_000).parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True)
    print("\n".join(table(run_large(folder, options.runs))))
    print("\n".join(table(run_narrow(folder, options.tensors))))


if __name__ == "__main__":
    main()
