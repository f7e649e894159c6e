"""Test the verification of folders of weights: intact ones are sound, each kind of defect is located."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mcore_ckpt_ext
from mcore_ckpt_ext.operations.findings import (
    CHECKSUMS,
    COMPLETE,
    COVERED,
    DTYPES,
    SCALES,
    VALUES,
    Finding,
    Verification,
)
from tests.harness.colossalai_folders import colossalai_checkpoint
from tests.harness.damage import flip, without_digests
from tests.harness.huggingface import make, tensors
from tests.harness.peft import adapter, peft_folder

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
QUERY = "model.layers.0.self_attn.q_proj.weight"
LAST = "model.norm.weight"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bfloat16, in two files and an index."""
    folder = tmp_path_factory.mktemp("intact") / "model"
    make("llama", folder, torch.bfloat16)
    stored = tensors(folder)
    (folder / "model.safetensors").unlink()
    write(folder, {name: SHARDS[number % 2] for number, name in enumerate(sorted(stored))}, stored)
    return folder


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "model"))


def write(folder: Path, places: dict[str, str], stored: dict[str, torch.Tensor]) -> None:
    for shard in set(places.values()):
        held = {name: tensor for name, tensor in stored.items() if places[name] == shard}
        save_file(held, folder / shard, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def places(folder: Path) -> dict[str, str]:
    found = json.loads((folder / INDEX).read_text())["weight_map"]
    assert isinstance(found, dict)
    return found


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Damage that rewrites one tensor, in a file that is otherwise in order."""

    def damage(folder: Path) -> None:
        write(folder, places(folder), {**tensors(folder), name: change(tensors(folder)[name]).contiguous()})

    return damage


def in_place(name: str, value: float) -> Callable[[Path], None]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[5] = value
        return tensor

    return changed(name, change)


def cut(folder: Path) -> None:
    os.truncate(folder / SHARDS[1], (folder / SHARDS[1]).stat().st_size - 10)


def scribbled_header(folder: Path) -> None:
    flip(folder / SHARDS[0], 8)


def without_shard(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()


def indexed_elsewhere(folder: Path) -> None:
    content = {"weight_map": {**places(folder), QUERY: "model-00003-of-00002.safetensors"}}
    (folder / INDEX).write_text(json.dumps(content))


def extra_key(folder: Path) -> None:
    stored = {**tensors(folder), "model.layers.0.self_attn.surplus": torch.ones(3, dtype=torch.bfloat16)}
    write(folder, {**places(folder), "model.layers.0.self_attn.surplus": SHARDS[0]}, stored)


def missing_key(folder: Path) -> None:
    stored = tensors(folder)
    del stored[QUERY]
    write(folder, {name: shard for name, shard in places(folder).items() if name in stored}, stored)


def held_twice(folder: Path) -> None:
    (other,) = set(SHARDS) - {places(folder)[QUERY]}
    stored = {**load_file(folder / other), QUERY: tensors(folder)[QUERY]}
    save_file(stored, folder / other, {"format": "pt"})


def not_indexed(folder: Path) -> None:
    content = {name: shard for name, shard in places(folder).items() if name != QUERY}
    (folder / INDEX).write_text(json.dumps({"weight_map": content}))


def numbers_in_metadata(folder: Path) -> None:
    path = folder / SHARDS[0]
    data = path.read_bytes()
    path.write_bytes(data.replace(b'{"format":"pt"}', b'{"format":1234}', 1))


def other_format(folder: Path) -> None:
    path = folder / SHARDS[0]
    path.write_bytes(path.read_bytes().replace(b'{"format":"pt"}', b'{"formal":"pt"}', 1))


def without_configuration(folder: Path) -> None:
    (folder / "config.json").write_text("{")


DEFECTS: dict[str, tuple[Callable[[Path], None], str, str, str]] = {
    "cut file": (cut, "error", COMPLETE, SHARDS[1]),
    "damaged header": (scribbled_header, "error", COMPLETE, SHARDS[0]),
    "missing shard": (without_shard, "error", COMPLETE, SHARDS[1]),
    "index that names another file": (indexed_elsewhere, "error", COMPLETE, "model-00003-of-00002.safetensors"),
    "damaged configuration": (without_configuration, "error", COMPLETE, "config.json"),
    "metadata that is not text": (numbers_in_metadata, "error", COMPLETE, SHARDS[0]),
    "metadata without a format": (other_format, "warning", COMPLETE, SHARDS[0]),
    "tensor that is not indexed": (not_indexed, "error", COVERED, "it holds tensors that"),
    "tensor in two files": (held_twice, "error", COVERED, f"{QUERY} is also in"),
    "extra key": (extra_key, "error", COVERED, "a model.layers.0.self_attn.surplus"),
    "missing key": (missing_key, "error", COVERED, f"no {QUERY}"),
    "wrong shape": (changed(QUERY, lambda tensor: tensor[:16]), "error", COVERED, f"{QUERY} is (16, 32), not (32, 32)"),
    "wrong dtype": (changed(QUERY, lambda tensor: tensor.float()), "warning", DTYPES, "1 tensor is in float32"),
    "NaN": (in_place(QUERY, float("nan")), "warning", VALUES, "1 element is NaN"),
    "infinite": (in_place(LAST, float("-inf")), "warning", VALUES, "1 element is infinite"),
}  # fmt: skip


def test_an_intact_folder_is_sound(intact: Path) -> None:
    found = mcore_ckpt_ext.verify(intact)
    assert (found.sound, found.findings) == (True, ())
    assert {check.name for check in found.checks if check.done} >= {COMPLETE, COVERED, DTYPES, VALUES}
    (checksums,) = (check for check in found.checks if check.name == CHECKSUMS)
    assert (checksums.done, "no checksums stored" in checksums.extent) == (False, True)


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_named(defect: str, folder: Path) -> None:
    damage, severity, check, words = DEFECTS[defect]
    damage(folder)
    found = mcore_ckpt_ext.verify(folder)
    assert found.sound == (severity == "warning")
    assert {(finding.severity, finding.check) for finding in found.findings} >= {(severity, check)}
    assert any(words in f"{finding.file} {finding.what}" for finding in found.findings if finding.check == check)


def test_every_damaged_file_is_named(folder: Path) -> None:
    cut(folder)
    scribbled_header(folder)
    found = mcore_ckpt_ext.verify(folder, quick=True)
    assert [finding.file for finding in found.findings] == list(SHARDS)


def test_a_flipped_bit_is_seen_where_there_are_checksums(intact: Path, tmp_path: Path) -> None:
    written = mcore_ckpt_ext.convert(intact, tmp_path / "out", mcore_ckpt_ext.HuggingFace()).destination
    assert mcore_ckpt_ext.verify(written).findings == ()
    file = written / "model.safetensors"
    flip(file, file.stat().st_size - 3)
    (finding,) = mcore_ckpt_ext.verify(written).findings
    assert (finding.severity, finding.check, finding.file) == ("error", CHECKSUMS, file.name)


def extents_of_checksums(folder: Path) -> list[tuple[bool, str]]:
    return [(check.done, check.extent) for check in mcore_ckpt_ext.verify(folder).checks if check.name == CHECKSUMS]


def test_files_without_checksums_are_counted_apart(intact: Path, tmp_path: Path) -> None:
    """A tool that writes one of several files anew leaves out the checksums of its tensors."""
    target = mcore_ckpt_ext.HuggingFace(max_shard_size=20_000)
    folder = without_digests(mcore_ckpt_ext.convert(intact, tmp_path / "out", target).destination)
    stored = load_file(first := min(folder.glob("*.safetensors")))
    total = sum(tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values())
    assert extents_of_checksums(folder) == [(True, f"CRC-32 of {total:,} bytes")]
    save_file(stored, first, {"format": "pt"})
    without = sum(tensor.nbytes for tensor in stored.values())
    (ok, compared), (done, said) = extents_of_checksums(folder)
    assert (ok, compared, done) == (True, f"CRC-32 of {total - without:,} bytes", False)
    assert said.startswith(f"of {without:,} bytes no checksums stored")


def test_an_archive_without_checksums_is_not_called_compared(intact: Path, tmp_path: Path) -> None:
    """PyTorch writes zeros if it is told to (`torch.serialization.set_crc32_options`)."""
    target = mcore_ckpt_ext.HuggingFace(pickled=True)
    folder = without_digests(mcore_ckpt_ext.convert(intact, tmp_path / "out", target).destination)
    assert [done for done, _ in extents_of_checksums(folder)] == [True]
    stored = torch.load(folder / "pytorch_model.bin")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(stored, folder / "pytorch_model.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    ((done, said),) = extents_of_checksums(folder)
    assert (done, said.startswith("no checksums stored")) == (False, True)


def test_a_model_of_an_unknown_family_is_checked_as_far_as_its_files_go(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "novel", "architectures": ["Novel"]}))
    found = mcore_ckpt_ext.verify(folder)
    assert (found.sound, found.findings) == (True, ())
    (covered,) = (check for check in found.checks if check.name == COVERED)
    assert (covered.done, "not compared with a model" in covered.extent) == (False, True)
    in_place(QUERY, float("nan"))(folder)
    assert [finding.where for finding in mcore_ckpt_ext.verify(folder).findings] == [QUERY]


def test_a_dtype_that_is_not_read_is_no_damage(folder: Path) -> None:
    path = folder / SHARDS[0]
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"U16" ', 1))
    found = mcore_ckpt_ext.verify(folder)
    assert found.sound
    (finding,) = found.findings
    assert (finding.severity, finding.check, finding.file) == ("warning", COMPLETE, SHARDS[0])
    assert "U16; not checked" in finding.what
    assert found.account is not None
    assert found.account.sentence.startswith(f"not looked at: {SHARDS[0]}, ")


def quantized(folder: Path, scale: float) -> None:
    """One matrix in fp8, with a scale for each block of 8 x 8."""
    stored = tensors(folder)
    stored[QUERY] = stored[QUERY].to(torch.float8_e4m3fn)
    stored[f"{QUERY}_scale_inv"] = torch.ones(4, 4)
    stored[f"{QUERY}_scale_inv"][1, 2] = scale
    write(folder, {**places(folder), f"{QUERY}_scale_inv": places(folder)[QUERY]}, stored)
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def scale_findings(found: Verification) -> list[Finding]:
    assert any(check.name == SCALES and check.done for check in found.checks)
    return [finding for finding in found.findings if finding.check == SCALES]


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_bad_scale_is_named(folder: Path, scale: float) -> None:
    quantized(folder, 0.5)
    assert scale_findings(mcore_ckpt_ext.verify(folder)) == []
    quantized(folder, scale)
    (finding,) = scale_findings(mcore_ckpt_ext.verify(folder))
    assert (finding.severity, finding.where) == ("error", f"{QUERY}_scale_inv")


def test_scales_of_other_quantizers_may_be_negative(folder: Path) -> None:
    """AutoRound's are, in folders of GPTQ's form; one that is not a number is named."""
    for scale in (-1.0, float("nan")):
        quantized(folder, scale)
        config = json.loads((folder / "config.json").read_text())
        settings = {"quant_method": "gptq", "bits": 4}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        assert len(scale_findings(mcore_ckpt_ext.verify(folder))) == (scale != -1.0)


@pytest.mark.parametrize(
    ("method", "codes", "scales"),
    [
        ("gptq", "qweight", "scales"),
        ("awq", "qweight", "scales"),
        ("compressed-tensors", "weight_packed", "weight_scale"),
        ("bitsandbytes", "weight", "SCB"),
        ("bitsandbytes", "weight", "weight.absmax"),
    ],
)
def test_missing_scales_of_quantizers_that_are_not_decoded(
    method: str, codes: str, scales: str, tmp_path: Path
) -> None:
    """The names cannot be compared with a model, and the codes of a linear without scales are lost all the same."""
    make("llama", tmp_path)
    stored = {name: tensor for name, tensor in tensors(tmp_path).items() if name != QUERY}
    module = QUERY.removesuffix(".weight")
    stored |= {f"{module}.{codes}": torch.ones(4, 4, dtype=torch.int8), f"{module}.{scales}": torch.ones(4)}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    save_file(stored, tmp_path / "model.safetensors")
    assert mcore_ckpt_ext.verify(tmp_path).sound
    del stored[f"{module}.{scales}"]
    save_file(stored, tmp_path / "model.safetensors")
    (finding,) = mcore_ckpt_ext.verify(tmp_path).findings
    assert (finding.check, finding.what) == (SCALES, f"{module}.{codes} has no scales")


def test_scales_of_another_shape_are_named(folder: Path) -> None:
    quantized(folder, 0.5)
    changed(f"{QUERY}_scale_inv", lambda tensor: tensor[:3])(folder)
    (finding,) = scale_findings(mcore_ckpt_ext.verify(folder, quick=True))
    assert "do not match" in finding.what


def test_a_tied_output_layer_that_differs_is_an_error(tmp_path: Path) -> None:
    make("qwen2", tmp_path / "model")
    assert mcore_ckpt_ext.verify(tmp_path / "model").sound
    stored = tensors(tmp_path / "model")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + 1
    save_file(stored, tmp_path / "model" / "model.safetensors")
    (finding,) = mcore_ckpt_ext.verify(tmp_path / "model").findings
    assert (finding.severity, "ties the output layer" in finding.what) == ("error", True)


def test_adapters_are_verified_alone_and_for_their_model(intact: Path, tmp_path: Path) -> None:
    content = adapter("model.layers.0.self_attn.q_proj", 32, 32)
    folder = peft_folder(tmp_path / "adapters", content)
    alone = mcore_ckpt_ext.verify(folder)
    assert (alone.sound, alone.findings) == (True, ())
    (covered,) = (check for check in alone.checks if check.name == COVERED)
    assert (covered.done, "--weights FOLDER" in covered.extent) == (False, True)
    assert COVERED in {check.name for check in mcore_ckpt_ext.verify(folder, weights=intact).checks if check.done}
    first, second = content
    peft_folder(folder, {first: content[first], second: content[second][:, :2].contiguous()})
    assert "their ranks differ" in mcore_ckpt_ext.verify(folder).findings[0].what
    peft_folder(folder, {first: content[first]})
    assert [finding.what for finding in mcore_ckpt_ext.verify(folder).findings] == [f"{first} has no {second}"]
    peft_folder(folder, {name: tensor.fill_(float("nan")) for name, tensor in content.items()})
    assert [finding.check for finding in mcore_ckpt_ext.verify(folder).findings] == [VALUES, VALUES]


def test_a_checkpoint_of_colossalai(tmp_path: Path) -> None:
    folder = colossalai_checkpoint(tmp_path)
    found = mcore_ckpt_ext.verify(folder)
    assert (found.sound, found.findings) == (True, ())
    states = folder / "optimizer" / "pytorch_optim-00001.bin"
    content = torch.load(states)
    content[0]["exp_avg"][1] = float("nan")
    torch.save(content, states)
    (finding,) = mcore_ckpt_ext.verify(folder).findings
    assert (finding.check, finding.where) == (VALUES, "exp_avg of parameter 0")
    del content[0]
    torch.save(content, states)
    (finding,) = mcore_ckpt_ext.verify(folder).findings
    assert (finding.severity, finding.check, finding.file) == ("error", COVERED, "optimizer/pytorch_optim-00001.bin")
    flip(states, states.stat().st_size // 2)
    assert CHECKSUMS in {finding.check for finding in mcore_ckpt_ext.verify(folder).findings}
    states.unlink()
    (finding,) = mcore_ckpt_ext.verify(folder).findings
    assert "pytorch_optim-00001.bin" in finding.what
