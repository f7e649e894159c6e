"""Test a `dp_zero_gather_scatter` object of more than 2 GB: reading slices takes little more than their memory."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MEBIBYTE = 1 << 20
NUMEL = 180_000_000
DTYPES = (torch.bfloat16, torch.float32)
# What the child process reads of each kind: in the middle, and to the very end; 96 MiB together.
SLICES = {"fp32_param": (90_000_000, 98_388_608), "exp_avg": (0, 8_388_608), "exp_avg_sq": (NUMEL - 8_388_608, NUMEL)}

CHILD = """
import ctypes, json, re, sys
from pathlib import Path
import torch
from mcore_ckpt_ext.storage.index_entries import StoredObject
from mcore_ckpt_ext.optimizers.dp_zero import buffer_arrays
from mcore_ckpt_ext.layout.buckets import BucketKey
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.torch_archive import TorchArchive
from mcore_ckpt_ext.transfer import Transfer, read_slice

def kibibytes(name):
    return int(re.search(rf"^{name}:\\s+(\\d+) kB$", Path("/proc/self/status").read_text(), re.M)[1])

folder, numel, slices = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
place = StoredObject("object", 0, (folder / "object").stat().st_size)
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
before = kibibytes("VmRSS")
reader = FolderReader(folder)
(content,) = TorchArchive(reader, place.file, place.offset, place.length).load()
arrays = buffer_arrays(content, place, "object")
whole, read = (Region.whole("x", (numel,)),), {}
for kind, (start, stop) in slices.items():
    array = arrays[BucketKey(0, "(torch.bfloat16, torch.float32)", 0), kind]
    read[kind] = read_slice(array, Transfer(reader), kind, Slice(whole, start, stop))
peak = 1024 * (kibibytes("VmHWM") - before)
ends = {kind: [values[0].item(), values[-1].item(), len(values)] for kind, values in read.items()}
print(json.dumps({"peak": peak, "bytes_read": reader.bytes_read, "ends": ends}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The object as Megatron writes it, one tensor of 720 MB for each kind."""
    folder = tmp_path_factory.mktemp("large")
    with torch.serialization.skip_data():  # only what is read afterwards is worth writing
        states = {kind: torch.empty(NUMEL) for kind in ("param", "exp_avg", "exp_avg_sq")}
        torch.save([{"buckets_coalesced": True, 0: {DTYPES: {**states, "numel_unpadded": NUMEL}}}], folder / "object")
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        (content,) = torch.load(folder / "object", mmap=True, weights_only=False)
    for number, (state, (start, stop)) in enumerate(zip(states, SLICES.values(), strict=True)):
        content[0][DTYPES][state][start:stop] = torch.arange(start, stop, dtype=torch.float32) + number
    assert (folder / "object").stat().st_size > 2e9
    return folder


@pytest.mark.thorough
def test_reading_slices_of_a_large_object_is_lazy(folder: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(folder), str(NUMEL), json.dumps(SLICES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (folder / "object").unlink()
    seen = json.loads(done.stdout)
    asked = 4 * sum(stop - start for start, stop in SLICES.values())
    assert asked == 96 * MEBIBYTE
    assert asked <= seen["bytes_read"] < asked + 1_000_000
    assert asked / 2 < seen["peak"] < asked + 256 * MEBIBYTE
    for number, (kind, (start, stop)) in enumerate(SLICES.items()):
        values = torch.tensor([start, stop - 1], dtype=torch.float32) + number
        assert seen["ends"][kind] == [*values.tolist(), stop - start]
