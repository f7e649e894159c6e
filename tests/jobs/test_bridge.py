"""Test Megatron-Bridge from PyPI: its genuine `save_checkpoint`, `load_checkpoint` and `AutoBridge`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_ckpt_ext import HuggingFace, TorchDist
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.description import run_config_of
from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint
from mcore_ckpt_ext.model_space.names import EXTRA_STATE
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.checkpoints import fixture_named
from tests.harness.huggingface import assert_same_whole, save_whole
from tests.harness.jobs import RANK_SCRIPTS, assert_same_optimizer
from tests.harness.packages import installed_beside, with_transformer_engine
from tests.harness.programs import Programs

pytestmark = pytest.mark.nightly

BRIDGE = os.environ.get("BRIDGE_VERSION", "0.6.2")
# Models that also see images, and the pipeline parallel size under which Bridge imports them.
SEEING = {"qwen2_5_vl": 2, "qwen3_vl": 2, "qwen3_vl_moe": 1, "gemma3": 2}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """A run of dense layers and one of experts, each saved by Bridge and loaded by it under another layout."""
    packages = installed_beside("megatron-bridge", BRIDGE, "--only-binary=:all:")
    script, found = RANK_SCRIPTS / "bridge_loop.py", Programs(tmp_path_factory.mktemp("bridge"))
    dense, experts = found.place("dense"), found.place("experts")
    found.add("dense", script, packages, 1, 4, "none", dense)
    found.add("stock refuses", script, packages, 2, 2, dense, "none", stock=True)
    found.add("dense, loaded", script, packages, 2, 2, dense, "none")
    found.add("dense, unmoved", script, packages, 1, 4, dense, "none")
    found.add("dense, unmoved, by stock", script, packages, 1, 4, dense, "none", stock=True)
    found.add("experts", script, packages, 1, 2, "none", experts, "experts", "expert-parallel")
    found.add("experts, loaded", script, packages, 2, 1, experts, "none", "experts")
    found.add("experts, undivided", script, packages, 1, 2, experts, "none", "experts")
    found.add("experts, undivided, by stock", script, packages, 1, 2, experts, "none", "experts", stock=True)
    imports = RANK_SCRIPTS / "bridge_import.py"
    found.add("imported", imports, packages, 2, 2, _hugging_face(found.folder), "none", found.place("imported"))
    for kind, pipeline in SEEING.items():
        source, seen = found.folder / kind, found.place(kind)
        save_whole(kind, source, num_hidden_layers=6 if kind == "gemma3" else 4)
        found.add(kind, imports, packages, 2, pipeline, source, "none", seen)
        if kind != "qwen3_vl":  # which is as the one with experts
            found.add(f"{kind}, loaded", imports, packages, 1, 2, source, seen, "none")
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        patch.setenv("MCORE_CKPT_EXT_EXPLAIN", "1")
        found.run()
    return found


def _hugging_face(folder: Path) -> Path:
    convert(fixture_named("p02").run, folder / "llama", HuggingFace(vocab_size=256))
    return folder / "llama"


def test_stock_refuses(ran: Programs) -> None:
    (ended,) = ran.ended["stock refuses"]
    assert "(TP, PP) mismatch after resume ((2, 2) vs (1, 4) from checkpoint): not supported" in ended


@pytest.mark.parametrize(
    "name", ["dense, loaded", "experts, loaded", "qwen2_5_vl, loaded", "qwen3_vl_moe, loaded", "gemma3, loaded"]
)
def test_it_resumes_under_another_layout(ran: Programs, name: str) -> None:
    """The live state under the new layout is that of the save, bit by bit."""
    assert_same_optimizer(ran.dump(name.partition(",")[0]), ran.dump(name))
    assert any("optimizer resumed from TP1 x PP4" in line for line in ran.output.splitlines())


@pytest.mark.parametrize(("name", "decision", "stock_can"), [
    ("dense, unmoved", "stock Megatron loads the optimizer", True),
    ("dense, loaded", "this package fills the optimizer", False),
    ("experts, undivided", "this package fills the optimizer", False),
])  # fmt: skip
def test_decision_agrees_with_stock(ran: Programs, name: str, decision: str, stock_can: bool) -> None:
    by_stock = "stock refuses" if name == "dense, loaded" else f"{name}, by stock"
    (decided,) = ran.printed(name, "loads the optimizer", "fills the optimizer")
    assert decision in decided
    assert (ran.ended[by_stock] == {"done"}) == stock_can
    for loaded in (name, *([by_stock] if stock_can else [])):
        assert_same_optimizer(ran.dump(name.partition(",")[0]), ran.dump(loaded))


def test_random_states_of_another_grid_are_not_requested(ran: Programs) -> None:
    """With several expert ranks Bridge stores a state for each data-parallel rank, otherwise it requests one."""
    assert open_checkpoint(ran.place("experts")).states.random_grid() == (2, 1, 2)
    assert any("rng_state/shard_" in ended for ended in ran.ended["experts, undivided, by stock"])
    assert len(ran.printed("experts, undivided", "random states stay as they are")) == 1


def test_offline(ran: Programs, tmp_path: Path) -> None:
    """What Bridge wrote is known, sound, and goes to Megatron and back."""
    run = ran.place("dense")
    found = inspect(run)
    assert (found.layout_text, found.unbelieved) == ("TP1 x PP4 x DP1", ())
    assert found.writer.version.startswith("Megatron-Bridge on Megatron Core 0.19")
    assert open_checkpoint(run).job.found_sidecar().sidecar is not None
    assert verify(run).sound
    convert(run, tmp_path / "megatron", TorchDist())
    convert(tmp_path / "megatron", tmp_path / "bridge", TorchDist(loop="bridge"))
    assert compare(run, tmp_path / "bridge").equal
    assert str(open_checkpoint(ran.place("experts")).job.layout) == "TP1 x PP2 x EP2 x DP2"


def test_weights_that_bridge_imported(ran: Programs, tmp_path: Path) -> None:
    """`AutoBridge` and this package take a Hugging Face folder for the same model."""
    source, run = ran.folder / "llama", ran.place("imported")
    assert ran.ended["imported"] == {"done"}
    assert verify(run).sound
    assert compare(source, run).equal
    convert(run, tmp_path / "exported", HuggingFace(vocab_size=256))
    assert compare(source, tmp_path / "exported").equal


@pytest.mark.parametrize("kind", SEEING)
def test_a_model_that_also_sees_images(ran: Programs, kind: str, tmp_path: Path) -> None:
    """Bridge's import and this package's have the same keys; it goes to Hugging Face by its folder's `config.json`."""
    source, run = ran.folder / kind, ran.place(kind)
    assert ran.ended[kind] == {"done"}
    assert open_checkpoint(run).job.found_sidecar().sidecar is not None
    assert verify(run).sound
    assert compare(source, run).equal
    convert(source, tmp_path / "ours", TorchDist(loop="bridge"))
    found = [_model_keys(folder) for folder in (run, tmp_path / "ours")]
    assert found[0] == found[1]
    sections = [run_config_of(open_checkpoint(folder).files.folder)["model"] for folder in (run, tmp_path / "ours")]
    same = {"_target_", "position_embedding_type", "image_token_id", "num_layers", "vocab_size", "rotary_base"}
    same |= {"window_size", "softmax_scale"} if kind == "gemma3" else {"mrope_section"}
    assert {name: sections[0][name] for name in same} == {name: sections[1][name] for name in same}
    for part in ("vision_config", "vision_projector_config"):
        ours = sections[1].get(part, {})
        # Bridge has a projector for released images alone.
        taken = ours.keys() - {"image_size", "patch_dim", "tokens_per_image"} if "projector" in part else ours.keys()
        assert {name: sections[0][part][name] for name in taken} == {name: ours[name] for name in taken}
    convert(run, tmp_path / "back", HuggingFace(vocab_size=250, tokenizer=source))
    assert_same_whole(kind, source, tmp_path / "back")


def _model_keys(run: Path) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes of the weights but for the vocabulary's, and extra states."""
    checkpoint = open_checkpoint(run).format.reader
    assert isinstance(checkpoint, TorchDistCheckpoint)
    arrays = {key: array.shape for key, array in checkpoint.index.arrays.items() if "optimizer" not in key}
    states = {key for key in checkpoint.index.objects if EXTRA_STATE in key}
    return {key: shape for key, shape in arrays.items() if "word_emb" not in key and "output_layer" not in key}, states
