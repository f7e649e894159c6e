"""Measures the conversion of fp8 weights in blocks of 128 x 128 to Megatron, against dequantization by torch.

    python benchmarks/quantized.py FOLDER [--runs 3] [--layers 48 --hidden 2560]

Makes a Llama of random codes and scales, 4.3 GB in fp8, in FOLDER, which needs five times as much. It is also compared
with a copy of the result. Dequantization by torch is DeepSeek's script (`fp8_cast_bf16.py`) without its kernel: tensor
by tensor, with each file read whole, into a Hugging Face folder in bf16, which would still have to be converted. All
ways are run in turn; each run is a separate process and ends when its bytes are on disk. Peak memory is the growth of
the process after its imports.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from command_line import parser_of, print_medians
from huggingface import MEASURED, OURS, copy, make, measured
from safetensors.torch import load_file, save_file

_SIDE = 128
_CODES_OF_NUMBERS = 0x7F  # the largest codes of both signs are NaN
_QUANTIZATION = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [_SIDE, _SIDE],
}  # fmt: skip

BY_TORCH = MEASURED.format(
    imports="""
import torch
from safetensors.torch import load_file, save_file

SIDE = 128
""",
    work="""
pathlib.Path(destination).mkdir()
for path in sorted(pathlib.Path(source).glob("*.safetensors")):
    stored = load_file(path)
    found = {}
    for name, tensor in stored.items():
        scale = stored.get(name + "_scale_inv")
        if scale is not None:
            rows, columns = tensor.shape
            whole = scale.repeat_interleave(SIDE, 0)[:rows].repeat_interleave(SIDE, 1)[:, :columns]
            found[name] = (tensor.float() * whole).bfloat16()
        elif not name.endswith("_scale_inv"):
            found[name] = tensor
    save_file(found, f"{destination}/{path.name}", {"format": "pt"})
for path in pathlib.Path(destination).iterdir():
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
""",
)


def quantize(folder: Path) -> int:
    """Replace every projection in a folder by random codes and scales, and return the bytes."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weight_map: dict[str, str] = {}
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        stored: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            stored[name] = tensor
            if "_proj" in name:
                codes = torch.randint(0, _CODES_OF_NUMBERS, tensor.shape, dtype=torch.uint8)
                stored[name] = codes.view(torch.float8_e4m3fn)
                blocks = [-(-size // _SIDE) for size in tensor.shape]
                stored[f"{name}_scale_inv"] = torch.rand(blocks) / 448
        save_file(stored, path, {"format": "pt"})
        weight_map |= dict.fromkeys(stored, path.name)
        total += sum(tensor.nbytes for tensor in stored.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    described = {**config, "torch_dtype": "bfloat16", "quantization_config": _QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(described))
    return total


def main() -> None:
    """Measure, and print the rows of the table."""
    parser = parser_of(__doc__, runs=3, layers=48, hidden=2560, feed_forward=8192, vocabulary=32000)
    options = parser.parse_args()
    source, out, other = (options.folder / name for name in ("fp8", "out", "other"))
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "feed_forward", "vocabulary")}
    make(source, **sizes)
    print(f"model: {quantize(source) / 1e9:.2f} GB in fp8")
    seconds: dict[str, list[float]] = {}
    memory: dict[str, float] = {}

    def note(what: str, found: dict[str, float]) -> None:
        seconds.setdefault(what, []).append(found["seconds"])
        memory[what] = max(memory.get(what, 0.0), found["memory"])

    for _ in range(options.runs):
        note("fp8 to torch_dist", measured(OURS, source, out, "torch_dist"))
        seconds.setdefault("cp of torch_dist", []).append(copy(out, other))
        shutil.rmtree(out)
        shutil.rmtree(other)
        note("fp8 to bf16 by torch", measured(BY_TORCH, source, other))
        shutil.rmtree(other)
    medians = print_medians(seconds, memory)
    ours = medians["fp8 to torch_dist"]
    print(f"fp8 to torch_dist: {ours / medians['cp of torch_dist']:.2f} x cp of what is written")
    print(f"against torch: {medians['fp8 to bf16 by torch'] / ours:.1f} x faster")


if __name__ == "__main__":
    main()
