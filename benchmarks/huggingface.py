"""Measures conversions to Hugging Face and back, against a copy of the bytes, and against a common script.

    python benchmarks/huggingface.py FOLDER [--runs 5] [--layers 24 --hidden 2560]

Makes a Llama with random weights, 4.4 GB in bf16, in FOLDER. In the common script, `torch.distributed.checkpoint` loads
the whole state dict, its arrays are sliced and renamed, and `safetensors` saves them in files of 5 GB. All three are
run in turn; each run is a separate process and ends when its bytes are on disk. Peak memory is the growth of the
process after its imports; pages of mapped files count if the process has them mapped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from command_line import parser_of, print_medians
from safetensors.torch import save_file

MEASURED = """
import json, os, pathlib, sys, time
{imports}
def memory(which):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition(which + ":")[2].split()[0]) * 1024
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten: a child has its parent's
before = memory("VmRSS")
begun = time.monotonic()
source, destination = sys.argv[1:3]
{work}
seconds = time.monotonic() - begun
print(json.dumps({{"seconds": seconds, "memory": memory("VmHWM") - before}}))
"""

OURS = MEASURED.format(
    imports="""
import torch, mcore_ckpt_ext
from mcore_ckpt_ext.operations import conversion
from mcore_ckpt_ext.targets import TARGETS
""",
    work="mcore_ckpt_ext.convert(source, destination, TARGETS[sys.argv[3]]())",
)
# Such scripts load all arrays by name into memory, then process layer by layer under the other names.
SCRIPT = MEASURED.format(
    imports="""
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

HEADS, GROUPS = 32, 8
""",
    work="""
reader = dcp.FileSystemReader(source + "/release")
entries = reader.read_metadata().state_dict_metadata
state = {
    key: torch.empty(entry.size, dtype=entry.properties.dtype)
    for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
}
dcp.load(state, storage_reader=reader, no_dist=True)
tensors = {
    "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
    "model.norm.weight": state["decoder.final_layernorm.weight"],
    "lm_head.weight": state["output_layer.weight"],
}
qkv = state["decoder.layers.self_attention.linear_qkv.weight"]
head = qkv.shape[1] // (HEADS + 2 * GROUPS)
for layer in range(qkv.shape[0]):
    name = f"model.layers.{layer}."
    arrays = {
        key.removeprefix("decoder.layers."): array[layer]
        for key, array in state.items() if key.startswith("decoder.layers.")
    }
    by_group = qkv[layer].view(GROUPS, HEADS // GROUPS + 2, head, -1)
    parts = by_group.split([HEADS // GROUPS, 1, 1], 1)
    for letter, part in zip("qkv", parts):
        tensors[f"{name}self_attn.{letter}_proj.weight"] = part.reshape(-1, qkv.shape[2]).contiguous()
    gate, up = arrays["mlp.linear_fc1.weight"].chunk(2)
    tensors |= {
        name + "mlp.gate_proj.weight": gate.contiguous(), name + "mlp.up_proj.weight": up.contiguous(),
        name + "mlp.down_proj.weight": arrays["mlp.linear_fc2.weight"].clone(),
        name + "self_attn.o_proj.weight": arrays["self_attention.linear_proj.weight"].clone(),
        name + "input_layernorm.weight": arrays["self_attention.linear_qkv.layer_norm_weight"].clone(),
        name + "post_attention_layernorm.weight": arrays["mlp.linear_fc1.layer_norm_weight"].clone(),
    }
pathlib.Path(destination).mkdir()
files, size = [{}], 0
for name, tensor in tensors.items():
    if files[-1] and size + tensor.nbytes > 5 * 10**9:
        files.append({})
        size = 0
    files[-1][name] = tensor
    size += tensor.nbytes
for number, part in enumerate(files, 1):
    save_file(part, f"{destination}/model-{number:05d}-of-{len(files):05d}.safetensors", {"format": "pt"})
for path in pathlib.Path(destination).iterdir():
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
""",
)


def make(folder: Path, *, layers: int, hidden: int, feed_forward: int, vocabulary: int) -> int:
    """Write a Llama with random weights, one file per layer, and return the bytes of its tensors."""
    folder.mkdir(parents=True)
    heads, groups = 32, 8
    head = hidden // heads
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "intermediate_size": feed_forward, "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head, "vocab_size": vocabulary, "max_position_embeddings": 4096, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    each = {
        "self_attn.q_proj": (heads * head, hidden), "self_attn.k_proj": (groups * head, hidden),
        "self_attn.v_proj": (groups * head, hidden), "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (feed_forward, hidden), "mlp.up_proj": (feed_forward, hidden),
        "mlp.down_proj": (hidden, feed_forward), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    parts: list[dict[str, tuple[int, ...]]] = [
        {f"model.layers.{layer}.{name}.weight": shape for name, shape in each.items()} for layer in range(layers)
    ]
    ends = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "model.norm": (hidden,)}
    parts.append({f"{name}.weight": shape for name, shape in ends.items()})
    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts):
        tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in part.items()}
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def copy(source: Path, destination: Path) -> float:
    """Return the seconds for `cp` of a folder and a flush of every file."""
    begun = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(destination)], check=True)
    for path in destination.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.monotonic() - begun


def measured(program: str, source: Path, destination: Path, *more: str) -> dict[str, float]:
    """Run once in a separate process."""
    command = [sys.executable, "-c", program, str(source), str(destination), *more]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, and print the rows of the table."""
    parser = parser_of(__doc__, runs=5, layers=24, hidden=2560, feed_forward=8192, vocabulary=32000)
    options = parser.parse_args()
    folder: Path = options.folder
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "feed_forward", "vocabulary")}
    print(f"model: {make(folder / 'hf', **sizes) / 1e9:.2f} GB")
    measured(OURS, folder / "hf", folder / "run", "torch_dist")
    seconds: dict[str, list[float]] = {}
    memory: dict[str, float] = {}

    def note(what: str, found: dict[str, float]) -> None:
        seconds.setdefault(what, []).append(found["seconds"])
        memory[what] = max(memory.get(what, 0.0), found["memory"])

    out, other = folder / "out", folder / "other"
    for _ in range(options.runs):
        note("to hf", measured(OURS, folder / "run", out, "hf"))
        seconds.setdefault("cp of hf", []).append(copy(out, other))
        shutil.rmtree(other)
        note("the common way", measured(SCRIPT, folder / "run", other))
        shutil.rmtree(other)
        shutil.rmtree(out)
        note("to torch_dist", measured(OURS, folder / "hf", out, "torch_dist"))
        seconds.setdefault("cp of torch_dist", []).append(copy(out, other))
        shutil.rmtree(out)
        shutil.rmtree(other)
    medians = print_medians(seconds, memory)
    ours = medians["to hf"]
    print(f"to hf: {ours / medians['cp of hf']:.2f} x cp (goal 1.2)")
    print(f"to torch_dist: {medians['to torch_dist'] / medians['cp of torch_dist']:.2f} x cp (goal 1.3)")
    faster, lighter = medians["the common way"] / ours, memory["the common way"] / memory["to hf"]
    print(f"against the common way: {faster:.1f} x faster (goal 4), {lighter:.1f} x less memory (goal 10)")


if __name__ == "__main__":
    main()
