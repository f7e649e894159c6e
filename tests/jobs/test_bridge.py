"""Megatron-Bridge from PyPI: its genuine `save_checkpoint`, `load_checkpoint` and `AutoBridge`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.description import run_config_of
from mcore_ckpt_ext.formats.torch_dist import TorchDistCheckpoint
from mcore_ckpt_ext.offline.comparison import compare
from mcore_ckpt_ext.offline.conversion import convert
from mcore_ckpt_ext.offline.inspection import inspect
from mcore_ckpt_ext.offline.verification import verify
from mcore_ckpt_ext.targets import HuggingFace, TorchDist
from tests.harness.checkpoints import fixture_named
from tests.harness.huggingface import assert_same_tensors, save_whole
from tests.harness.jobs import RANK_SCRIPTS, assert_same_optimizer
from tests.harness.packages import installed_beside
from tests.harness.programs import Programs

BRIDGE = os.environ.get("BRIDGE_VERSION", "0.6.2")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """A run of dense layers and one of experts, each saved by Bridge and loaded by it under another layout."""
    packages = installed_beside("megatron-bridge", BRIDGE, "--only-binary=:all:")
    script, found = RANK_SCRIPTS / "bridge_loop.py", Programs(tmp_path_factory.mktemp("bridge"))
    dense, experts = found.place("dense"), found.place("experts")
    found.add("dense", script, packages, 1, 4, "none", dense)
    found.add("stock refuses", script, packages, 2, 2, dense, "none", stock=True)
    found.add("dense, loaded", script, packages, 2, 2, dense, "none")
    found.add("dense, on one stage", script, packages, 4, 1, dense, "none")
    found.add("experts", script, packages, 1, 2, "none", experts, "experts")
    found.add("experts, loaded", script, packages, 2, 1, experts, "none", "experts")
    imports, source = RANK_SCRIPTS / "bridge_import.py", _hugging_face(found.folder)
    imported = found.place("imported")
    found.add("imported", imports, packages, 2, 2, source, "none", imported)
    found.add("imported, loaded", imports, packages, 1, 4, source, imported, "none")
    seeing = found.folder / "seeing"
    save_whole("qwen2_5_vl", seeing, hidden_size=256, num_attention_heads=2, num_key_value_heads=2)
    found.add("seeing", imports, packages, 2, 2, seeing, "none", found.place("seen"))
    found.run()
    return found


def _hugging_face(folder: Path) -> Path:
    convert(fixture_named("p02").run, folder / "llama", HuggingFace(vocab_size=256))
    return folder / "llama"


def test_stock_refuses(ran: Programs) -> None:
    (ended,) = ran.ended["stock refuses"]
    assert "(TP, PP) mismatch after resume ((2, 2) vs (1, 4) from checkpoint): not supported" in ended


@pytest.mark.parametrize("name", ["dense, loaded", "dense, on one stage", "experts, loaded"])
def test_it_resumes_under_another_layout(ran: Programs, name: str) -> None:
    """The live state under the new layout is that of the save, bit by bit."""
    assert_same_optimizer(ran.dump(name.partition(",")[0]), ran.dump(name))
    assert any("optimizer resumed from TP1 x PP4" in line for line in ran.output.splitlines())


def test_offline(ran: Programs, tmp_path: Path) -> None:
    """What Bridge wrote is known, sound, and goes to Megatron and back."""
    run = ran.place("dense")
    found = inspect(run)
    assert (found.layout_text, found.unbelieved) == ("TP1 x PP4 x DP1", ())
    assert found.writer.version.startswith("Megatron-Bridge on Megatron Core 0.19")
    assert open_checkpoint(run).sidecar is not None
    assert verify(run).sound
    convert(run, tmp_path / "megatron", TorchDist())
    convert(tmp_path / "megatron", tmp_path / "bridge", TorchDist(loop="bridge"))
    assert compare(run, tmp_path / "bridge").equal
    assert str(open_checkpoint(ran.place("experts")).layout) == "TP1 x PP2 x DP2"


def test_weights_that_bridge_imported(ran: Programs, tmp_path: Path) -> None:
    """`AutoBridge` and this package take a Hugging Face folder for the same model, and its job resumes."""
    source, run = ran.folder / "llama", ran.place("imported")
    assert verify(run).sound
    assert compare(source, run).equal
    assert_same_optimizer(ran.dump("imported"), ran.dump("imported, loaded"))
    convert(run, tmp_path / "exported", HuggingFace(vocab_size=256))
    assert compare(source, tmp_path / "exported").equal


def test_a_model_that_also_sees_images(ran: Programs, tmp_path: Path) -> None:
    """What it sees with stands whole on the first stage; it goes to Hugging Face by the `config.json` of its folder."""
    source, run = ran.folder / "seeing", ran.place("seen")
    assert ran.ended["seeing"] == {"done"}
    assert verify(run).sound
    assert compare(source, run).equal
    convert(source, tmp_path / "ours", TorchDist(loop="bridge"))
    arrays = [_model_keys(folder) for folder in (run, tmp_path / "ours")]
    assert arrays[0] == arrays[1]
    sections = [run_config_of(open_checkpoint(folder).folder)["model"] for folder in (run, tmp_path / "ours")]
    names = ("_target_", "position_embedding_type", "mrope_section", "image_token_id", "num_layers", "vocab_size")
    assert all(sections[0][name] == sections[1][name] for name in names)
    seen, ours = (section["vision_config"] for section in sections)
    assert {name: seen[name] for name in ours} == ours
    convert(run, tmp_path / "back", HuggingFace(vocab_size=250, tokenizer=source))
    assert compare(source, tmp_path / "back").equal
    assert_same_tensors(source, tmp_path / "back")


def _model_keys(run: Path) -> dict[str, tuple[int, ...]]:
    checkpoint = open_checkpoint(run)
    assert isinstance(checkpoint, TorchDistCheckpoint)
    arrays = {key: array.shape for key, array in checkpoint.index.arrays.items() if "optimizer" not in key}
    return {key: shape for key, shape in arrays.items() if "word_embeddings" not in key and "output_layer" not in key}
