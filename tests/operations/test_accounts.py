"""Test that every verdict says what it looked at: each stored key of a checkpoint is in one class of an account."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.accounts import Account
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_folder
from mcore_ckpt_ext.storage.json_tree import encode
from tests.harness.checkpoints import fixture_named
from tests.harness.colossalai_folders import colossalai_checkpoint
from tests.harness.damage import without_digests
from tests.harness.huggingface import make, save_whole, tensors
from tests.harness.peft import adapter, peft_folder
from tests.harness.unknown_keys import (
    LOST,
    OTHER,
    STRANGE,
    add_to_legacy,
    add_to_plain_dcp,
    add_to_torch_dist,
    add_to_zarr,
)

KNOWN_TOWERS = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava")


def save_llava(folder: Path) -> None:
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100,
    }  # fmt: skip
    config = transformers.LlavaConfig(vision_config=vision, text_config=text)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vision-language models whose towers this package knows."""
    root = tmp_path_factory.mktemp("wholes")
    for name in KNOWN_TOWERS:
        if name == "llava":
            save_llava(root / name)
        else:
            save_whole(name, root / name)
    return root


def damaged(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(source, folder)
    stored = tensors(folder)
    change(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return folder


def of_vision(stored: dict[str, torch.Tensor], part: str) -> str:
    return next(name for name in sorted(stored) if part in name)


# The number of a block, and a part that is there once.
PARTS = {
    "qwen2_5_vl": ("visual.blocks.0.attn.qkv.weight", "visual.merger.mlp.0.bias"),
    "qwen3_vl": ("visual.blocks.1.mlp.linear_fc1.bias", "visual.deepstack_merger_list.1.norm.weight"),
    "gemma3": ("encoder.layers.1.self_attn.out_proj.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
    "llava": ("encoder.layers.0.mlp.fc2.bias", "multi_modal_projector.linear_2.weight"),
}


@pytest.mark.parametrize("name", KNOWN_TOWERS)
def test_a_vision_part_that_is_whole_is_sound(name: str, wholes: Path) -> None:
    found = verify(wholes / name)
    assert found.sound
    assert found.account is not None
    assert not any("vision" in item.why for item in found.account.not_looked_at)
    quick = verify(wholes / name, quick=True)
    assert quick.sound


@pytest.mark.parametrize("name", KNOWN_TOWERS)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("quick", [True, False])
def test_a_vision_tensor_that_is_missing_or_cut(
    name: str, which: int, quick: bool, wholes: Path, tmp_path: Path
) -> None:
    part = PARTS[name][which]

    def remove(stored: dict[str, torch.Tensor]) -> None:
        del stored[of_vision(stored, part)]

    def cut(stored: dict[str, torch.Tensor]) -> None:
        label = of_vision(stored, part)
        stored[label] = stored[label][:-1].clone()

    for what, change in (("lacks tensors", remove), ("has the shape", cut)):
        found = verify(damaged(wholes / name, tmp_path / what, change), quick=quick)
        assert not found.sound
        (problem,) = (finding for finding in found.findings if finding.severity == "error")
        assert what in problem.what
        assert part.partition(".")[2] in problem.what


def test_text_without_its_vision_part_is_not_equal(
    wholes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run, text = wholes / "qwen2_5_vl", tmp_path / "run", tmp_path / "text"
    report = mcore_ckpt_ext.convert(whole, run, mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(run, text, mcore_ckpt_ext.HuggingFace())
    vision = {name for name in tensors(whole) if "visual." in name}
    assert {item.key for item in report.account.not_looked_at} == vision
    assert {item.key for item in inspect(whole).account.not_looked_at} == vision
    for other in (run, text):
        assert main(["diff", str(whole), str(other)]) == 1
        told = capsys.readouterr().out
        assert told.splitlines()[-1].startswith("NOT KNOWN TO BE EQUAL")
        assert f"{len(vision)} keys were not compared" in told
        assert main(["diff", str(other), str(whole), "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
        assert (document["equal"], document["missed"]) == (False, len(vision))
        assert {item["key"] for item in document["account_b"]["not_looked_at"]} == vision
    assert compare(run, text).equal
    assert compare(whole, whole).account_a.not_looked_at == ()


def test_a_vision_part_that_nobody_describes(wholes: Path, tmp_path: Path) -> None:
    """Names and shapes of a tower that this package does not know are in the account, and in the verdict."""
    save_whole("mistral3", tmp_path / "whole")
    account = verify(tmp_path / "whole").account
    assert account is not None
    vision = {name for name in tensors(tmp_path / "whole") if "vision_tower" in name or "multi_modal" in name}
    assert {item.key for item in account.not_looked_at} == vision
    assert "not looked at: " in account.sentence


def test_a_tensor_that_nobody_knows_in_folders_of_weights(wholes: Path, tmp_path: Path) -> None:
    """Of the vision part it is in the account; of the text, the folder is refused, as it is another model."""

    def add(stored: dict[str, torch.Tensor]) -> None:
        stored["visual.mystery.weight"] = torch.ones(3)

    folder = damaged(wholes / "qwen2_5_vl", tmp_path / "vision", add)
    account = verify(folder).account
    assert account is not None
    assert [item.key for item in account.not_looked_at] == ["visual.mystery.weight"]

    def add_to_text(stored: dict[str, torch.Tensor]) -> None:
        stored["model.language_model.layers.0.mystery.weight"] = torch.ones(3)

    folder = damaged(wholes / "qwen2_5_vl", tmp_path / "text", add_to_text)
    assert any("a model.layers.0.mystery.weight" in finding.what for finding in verify(folder).findings)


def of_torch_dist(folder: Path) -> Path:
    return fixture_named("p01").copy_to(folder).iteration


def of_zarr(folder: Path) -> Path:
    return fixture_named("p31").copy_to(folder).iteration


def of_legacy(folder: Path) -> Path:
    return fixture_named("p08b").copy_to(folder).iteration


def of_verl(folder: Path) -> Path:
    shutil.copytree(of_torch_dist(folder / "source"), folder / "step" / "dist_ckpt")
    return folder / "step" / "dist_ckpt"


def of_nemo(folder: Path) -> Path:
    shutil.copytree(of_torch_dist(folder / "source"), folder / "weights")
    return folder / "weights"


FOLDERS = {
    "torch_dist": (of_torch_dist, add_to_torch_dist), "zarr": (of_zarr, add_to_zarr),
    "legacy": (of_legacy, add_to_legacy), "verl": (of_verl, add_to_torch_dist), "nemo": (of_nemo, add_to_torch_dist),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_key_that_nobody_knows_is_in_every_account(name: str, tmp_path: Path) -> None:
    """The same for `fsdp_dtensor` and `torch_dcp` in tests/formats, for `canonical` in test_unsupported_state.py."""
    make, add = FOLDERS[name]
    place = make(tmp_path / "folder")
    folder = place.parent if name == "verl" else place
    assert mcore_ckpt_ext.open_checkpoint(folder).format.name in (name, "torch_dist", "torch")
    before = inspect(folder).account
    add(place)
    verified, compared = verify(folder, quick=True).account, compare(folder, folder, kinds=[WEIGHT])
    target = mcore_ckpt_ext.Canonical()
    kinds = [item.kind for item in mcore_ckpt_ext.open_checkpoint(folder).files.unread() if item.is_of_optimizer_state]
    converted = mcore_ckpt_ext.convert(folder, tmp_path / "out", target, drop=kinds, dry_run=True).account
    inspected = inspect(folder).account
    assert verified is not None
    for account in (verified, compared.account_a, compared.account_b, converted, inspected):
        assert LOST in {item.key for item in account.unknown}
    # The other keys are in the class in which they were.
    assert (inspected.compared, inspected.by_form) == (before.compared, before.by_form)
    everything = converted.compared + converted.by_form
    assert everything == inspected.by_form == verified.by_form


def of_fsdp(name: str) -> Callable[[Path], Path]:
    return lambda folder: fixture_named(name).copy_to(folder).iteration


def of_canonical(folder: Path) -> Path:
    mcore_ckpt_ext.convert(fixture_named("p02").run, folder, mcore_ckpt_ext.Canonical())
    return folder


def add_to_canonical(folder: Path) -> None:
    about = json.loads((folder / "common.json").read_text())
    about["common"] = encode({**mcore_ckpt_ext.open_checkpoint(folder).job.common(), OTHER: STRANGE})
    (without_digests(folder) / "common.json").write_text(json.dumps(about))


def of_hugging_face(folder: Path) -> Path:
    make("llama", folder)
    return folder


def of_pickled_hugging_face(folder: Path) -> Path:
    mcore_ckpt_ext.convert(fixture_named("p02").run, folder, mcore_ckpt_ext.HuggingFace(pickled=True))
    return without_digests(folder)


def add_to_bin(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    torch.save({**torch.load(path), IN_A_LAYER: STRANGE}, path)


def of_bridge(folder: Path) -> Path:
    mcore_ckpt_ext.convert(fixture_named("p02").run, folder, mcore_ckpt_ext.TorchDist(loop="bridge"))
    return without_digests(iteration_folder(folder))


def of_adapters(folder: Path) -> Path:
    make("llama", folder.parent / "base")
    return peft_folder(folder, adapter("model.layers.0.self_attn.q_proj", 32, 32))


def base_of(folder: Path) -> Path | None:
    """Return the model that adapters were trained for; None for other folders."""
    return folder.parent / "base" if (folder / "adapter_config.json").exists() else None


def add_to_safetensors(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    content = {**load_file(path), IN_A_LAYER: STRANGE}
    save_file(content, path, metadata={"format": "pt"})


def of_colossalai(folder: Path) -> Path:
    return colossalai_checkpoint(folder)


def add_to_colossalai(folder: Path) -> None:
    path = next(folder.glob("modeling/*00001.bin"))
    torch.save({**torch.load(path), IN_A_LAYER: STRANGE}, path)
    index = next(folder.glob("modeling/*.index.json"))
    content = json.loads(index.read_text())
    content["weight_map"][IN_A_LAYER] = path.name
    index.write_text(json.dumps(content))


IN_A_LAYER = "model.layers.0.mystery.weight"
# For each format: a folder, what adds a key to it, and the key.
STRANGERS = {
    "fsdp_dtensor": (of_fsdp("p50"), add_to_plain_dcp, LOST),
    "torch_dcp": (of_fsdp("p51"), add_to_plain_dcp, LOST),
    "canonical": (of_canonical, add_to_canonical, OTHER),
    "bridge": (of_bridge, add_to_torch_dist, LOST),
    "hf": (of_hugging_face, add_to_safetensors, IN_A_LAYER),
    "bin": (of_pickled_hugging_face, add_to_bin, IN_A_LAYER),
    "peft": (of_adapters, add_to_safetensors, IN_A_LAYER),
    "colossalai": (of_colossalai, add_to_colossalai, IN_A_LAYER),
}


def told(account: Account | None) -> list[str]:
    return [] if account is None else [item.key for item in account.not_looked_at]


def of_a_conversion(folder: Path, out: Path) -> Account:
    """The account of a conversion that leaves out all optimizer state that it cannot convert."""
    base = base_of(folder)
    kinds = [
        item.kind
        for item in mcore_ckpt_ext.open_checkpoint(folder, weights=base).files.unread()
        if item.is_of_optimizer_state
    ]
    target = mcore_ckpt_ext.Canonical()
    return mcore_ckpt_ext.convert(folder, out, target, drop=kinds, dry_run=True, weights=base).account


def of_a_verification(folder: Path) -> list[str]:
    found = verify(folder, weights=base_of(folder))
    return told(found.account) + [finding.what for finding in found.findings]


# What each command says about the keys of a folder.
COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "inspect": lambda folder, out: told(inspect(folder, weights=base_of(folder)).account),
    "verify": lambda folder, out: of_a_verification(folder),
    "diff": lambda folder, out: told(compare(folder, folder, weights=base_of(folder)).account_a),
    "convert": lambda folder, out: told(of_a_conversion(folder, out)),
}


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    root, found = tmp_path_factory.mktemp("strangers"), {}
    for name, (make_folder, add, key) in STRANGERS.items():
        folder = make_folder(root / name)
        format_name = {"bridge": "torch_dist", "bin": "hf"}.get(name, name)
        assert mcore_ckpt_ext.open_checkpoint(folder, weights=base_of(folder)).format.name == format_name
        add(folder)
        found[name] = (folder, key)
    return found


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", STRANGERS)
def test_every_command_names_a_key_that_nobody_knows_or_refuses_it(
    name: str, command: str, strangers: dict[str, tuple[Path, str]], tmp_path: Path
) -> None:
    folder, key = strangers[name]
    try:
        said = COMMANDS[command](folder, tmp_path / "out")
    except CheckpointError as refusal:
        said = [str(refusal)]
    assert any(key.removeprefix("model.") in text for text in said), said
