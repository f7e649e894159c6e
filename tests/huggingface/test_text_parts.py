"""Tests language models of vision-language models: models of their family with the same outputs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.family import HuggingFaceTensor
from mcore_ckpt_ext.families.recognition import family_of_config
from mcore_ckpt_ext.families.text_parts import text_config, turned_stack
from mcore_ckpt_ext.families.vision_towers import VISION_TOWERS, vision_model_type
from mcore_ckpt_ext.formats.description import run_config_of
from mcore_ckpt_ext.operations.comparison import compare
from tests.harness.hearing import ALSO_HEARING, save_hearing
from tests.harness.huggingface import WHOLE, assert_same_tensors, assert_same_whole, make, save_whole, tensors

_SEES = r"(model\.)?(visual|vision_tower|multi_modal_projector|mm_projector)\."


@pytest.mark.thorough
@pytest.mark.parametrize("name", WHOLE)
def test_the_text_answers_as_the_whole_does(name: str, tmp_path: Path) -> None:
    model = save_whole(name, tmp_path / "whole")
    report = mcore_ckpt_ext.convert(tmp_path / "whole", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    assert any(note.startswith(f"of {name} only the text is read, as a ") for note in report.notes)
    assert any(re.match(_SEES, item.key) for item in report.unread)
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "text", mcore_ckpt_ext.HuggingFace())
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    of_text = {
        re.sub(r"^(model\.language_model|language_model\.model)\.|^language_model\.(?=lm_head)",
               lambda match: "model." if match[1] else "", label): tensor
        for label, tensor in tensors(tmp_path / "whole").items() if not re.match(_SEES, label)
    }  # fmt: skip
    found, written = tensors(tmp_path / "text"), [label for label in of_text if ".experts." not in label]  # or stacked
    assert {label for label in found if ".mlp.experts." not in label} == {*written}
    assert all(torch.equal(found[label], of_text[label]) for label in written)


@pytest.mark.parametrize("name", ALSO_HEARING)
def test_the_text_of_models_that_hear(name: str, tmp_path: Path) -> None:
    model = save_hearing(name, tmp_path / "whole")
    report = mcore_ckpt_ext.convert(tmp_path / "whole", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    assert [note for note in report.notes if note.endswith("; other parts are not converted yet")]
    _check_text(model, tmp_path)


def test_the_first_llava_has_one_level_of_keys(tmp_path: Path) -> None:
    """Its classes are Llama's and Mistral's, with a projector and a tower (llava/model of haotian-liu/LLaVA)."""
    folder = tmp_path / "whole"
    make("llama", folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    seeing = ("model.mm_projector.0.weight", "model.vision_tower.vision_tower.x.weight", "model.image_newline")
    save_file({**tensors(folder), **{name: torch.ones(2) for name in seeing}}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    of_images = {
        "mm_vision_tower": "openai/clip-vit-large-patch14-336", "mm_hidden_size": 1024, "mm_vision_select_layer": -2,
        "tune_mm_mlp_adapter": False, "freeze_mm_vision_resampler": False, "unfreeze_mm_vision_tower": False,
        "image_aspect_ratio": "pad", "use_mm_proj": True, "mm_use_im_patch_token": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**text, **of_images, "model_type": "llava"}))
    report = mcore_ckpt_ext.convert(folder, tmp_path / "run", mcore_ckpt_ext.TorchDist())
    assert {item.key for item in report.unread} == {*seeing}
    assert not any("mm_hidden_size" in note for note in report.notes)
    _check_text(model, tmp_path)


def test_sizes_that_llava_leaves_out_are_those_of_the_class_of_its_text() -> None:
    """llava-1.5-7b-hf states only these keys of its text; MAIRA-2 has LLaVA's form."""
    stated = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    for kind in ("llava", "maira2"):
        text = text_config({"model_type": kind, "text_config": stated, "tie_word_embeddings": False})
        assert text is not None
        assert text["model_type"] == "llama"
        family = family_of_config(text, "here")
        arguments = family.arguments(text)
        assert arguments.vocab_size == 32064
        class_of_model = LlamaConfig(**stated)
        expected = (class_of_model.num_hidden_layers, class_of_model.hidden_size, class_of_model.intermediate_size)
        assert (arguments.num_layers, arguments.hidden_size, arguments.ffn_hidden_size) == expected
    with pytest.raises(UnsupportedCheckpointError, match="model_type opt: its MLP has ReLU"):
        family_of_config(text_config({"model_type": "llava", "text_config": {"model_type": "opt"}}) or {}, "here")


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_the_text_of_models_that_also_speak(name: str, tmp_path: Path) -> None:
    """Released folders contain the thinker of such a model and its other parts."""
    folder = tmp_path / "whole"
    model = save_hearing(f"{name}_thinker", folder)
    stored = {f"thinker.{label}": tensor for label, tensor in tensors(folder).items()}
    save_file({**stored, "talker.codec_head.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    thinker = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": name, "thinker_config": thinker}))
    mcore_ckpt_ext.convert(folder, tmp_path / "run", mcore_ckpt_ext.TorchDist())
    _check_text(model, tmp_path)


@pytest.mark.parametrize("kind", ["NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3"])
def test_the_text_of_nemotron_that_sees_and_hears(kind: str, tmp_path: Path) -> None:
    """transformers has no class; names and parts are those of Bridge's mapping (models/nemotron_vl, nemotron_omni)."""
    folder = tmp_path / "whole"
    make("nemotron_h", folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    others = {"vision_model.radio_model.model.patch_generator.pos_embed": torch.ones(1, 2, 2),
              "mlp1.0.weight": torch.ones(2), "sound_encoder.encoder.layers.0.norm_out.bias": torch.ones(2),
              "sound_projection.norm.weight": torch.ones(2)}  # fmt: skip
    stored = {f"language_model.{label}": tensor for label, tensor in tensors(folder).items()}
    save_file({**stored, **others}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": kind, "architectures": [kind], "llm_config": text, "vision_config": {}, "projector": 1}
    (folder / "config.json").write_text(json.dumps(whole))
    mcore_ckpt_ext.convert(folder, tmp_path / "run", mcore_ckpt_ext.TorchDist())
    _check_text(model, tmp_path)


def _check_text(model: torch.nn.Module, root: Path) -> None:
    """Check that transformers loads the exported text, which has every bit and answers as the whole model does."""
    mcore_ckpt_ext.convert(root / "run", root / "text", mcore_ckpt_ext.HuggingFace())
    loaded, info = AutoModelForCausalLM.from_pretrained(root / "text", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_experts_that_lie_transposed(tmp_path: Path) -> None:
    """Qwen3-VL-30B-A3B was published transposed; transformers 5 writes the other orientation, and reads both."""
    model = save_whole("qwen3_vl_moe", tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    stored = tensors(tmp_path / "whole")
    stacked = {name for name in stored if ".mlp.experts." in name}
    assert {stored[name].shape for name in stacked} == {(4, 24, 32), (4, 32, 12)}
    turned = {name: stored[name].transpose(1, 2).contiguous() for name in stacked}
    save_file({**stored, **turned}, file)
    mcore_ckpt_ext.convert(tmp_path / "whole", tmp_path / "run", mcore_ckpt_ext.TorchDist(), memory_limit=1)
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "text", mcore_ckpt_ext.HuggingFace())
    found = tensors(tmp_path / "text")
    gate, up = stored["model.language_model.layers.1.mlp.experts.gate_up_proj"][3].chunk(2)
    assert torch.equal(found["model.layers.1.mlp.experts.3.gate_proj.weight"], gate)
    assert torch.equal(found["model.layers.1.mlp.experts.3.up_proj.weight"], up)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        answer = AutoModelForCausalLM.from_pretrained(tmp_path / "text")(tokens).logits
        torch.testing.assert_close(answer, model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_configuration_without_a_part_for_its_text(tmp_path: Path) -> None:
    """Qwen2.5-VL was published with all keys on one level, and positions of type `mrope`."""
    save_whole("qwen2_5_vl", tmp_path / "whole")
    file = tmp_path / "whole" / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    del text["rope_parameters"]
    flat = {**text, **config, "model_type": "qwen2_5_vl", "rope_theta": 1000000.0}
    file.write_text(json.dumps({**flat, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}))
    mcore_ckpt_ext.convert(tmp_path / "whole", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "text", mcore_ckpt_ext.HuggingFace())
    found = json.loads((tmp_path / "text" / "config.json").read_text())
    assert (found["model_type"], found["rope_scaling"], found["rope_theta"]) == ("qwen2", None, 1000000.0)
    compared = compare(tmp_path / "whole", tmp_path / "text")
    assert (compared.equal, compared.missed) == (False, 18)  # the vision part, which is in one of them alone


MAPPED = {"language_model.output_layer.weight", "language_model.embedding.word_embeddings.weight",
          "language_model.decoder.layers.0.self_attention.linear_qkv.bias", "visual.blocks.0.attn.qkv.weight",
          "visual.merger.mlp.2.bias", "visual.patch_embed.proj.weight"}  # fmt: skip


# Keys of a `config.json` that may contradict the tensors.
UNLIKE: dict[str, list[tuple[str, str, object, str]]] = {
    "qwen3_vl": [
        ("vision_config", "deepstack_visual_indexes", [0, 9], r"\[0, 9\], and it has 2 blocks"),
        ("text_config", "rope_parameters", {"rope_theta": 1e6, "mrope_section": [1, 2, 2]}, "heads have 8 elements"),
    ],
    "gemma3": [
        ("vision_config", "image_size", 896, "896 of patches of 14, and the tensor has 16 rows"),
        ("vision_config", "vision_use_head", True, "vision_use_head is not false"),
        ("vision_config", "model_type", "clip_vision_model", "model_type: clip_vision_model"),
    ],
}


# Some names of each model as in Bridge's own mapping (models/*/*_bridge.py of 0.6.2).
NAMES = {
    "qwen3_vl": {
        "vision_model.decoder.layers.1.self_attention.linear_qkv.layer_norm_bias", "vision_model.pos_embed.weight",
        "vision_model.decoder.deepstack_merger_list.1.patch_norm.weight", "vision_model.merger.linear_fc2.bias",
    },
    "qwen3_vl_moe": {"language_model.decoder.layers.0.mlp.experts.experts.3.linear_fc1.weight"},
    "gemma3": {
        "vision_tower.encoder.layers.1.self_attn.out_proj.bias", "multi_modal_projector.proj.weight",
        "language_model.decoder.layers.5.mlp.linear_fc2.post_layernorm.weight",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_a_config_that_contradicts_the_vision_tower(name: str, tmp_path: Path) -> None:
    for_bridge = mcore_ckpt_ext.TorchDist(loop="bridge")
    model = save_whole(name, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for part, key, value, said in UNLIKE[name]:
        file.write_text(json.dumps({**config, part: {**config[part], key: value}}))
        with pytest.raises(UnsupportedCheckpointError, match=said):
            mcore_ckpt_ext.convert(tmp_path, tmp_path / "none", for_bridge)
    file.write_text(json.dumps(config))
    more = {"model.visual.head.weight": model.state_dict()["lm_head.weight"]}
    save_file({**tensors(tmp_path), **more}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpointError, match="found: a model.visual.head.weight"):
        mcore_ckpt_ext.convert(tmp_path, tmp_path / "none", for_bridge)


@pytest.mark.parametrize("name", NAMES)
def test_vision_towers_in_megatron_layers_or_with_a_projector(name: str, tmp_path: Path) -> None:
    """The round trip is exact for transformers; Bridge's import has the same keys (tests/jobs/test_bridge.py)."""
    source, run, back = (tmp_path / place for place in ("whole", "run", "back"))
    model = save_whole(name, source)
    (source / "video_preprocessor_config.json").write_text("{}")
    mcore_ckpt_ext.convert(source, run, mcore_ckpt_ext.TorchDist(loop="bridge"))
    names = set(mcore_ckpt_ext.open_checkpoint(run).names("weight"))
    assert names >= NAMES[name]
    report = mcore_ckpt_ext.convert(run, back, mcore_ckpt_ext.HuggingFace())
    assert not any("left out" in note for note in report.notes)
    assert_same_whole(name, source, back)
    assert (back / "video_preprocessor_config.json").exists()
    assert compare(source, back).equal
    loaded, info = type(model).from_pretrained(back, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[label]) for label, tensor in loaded.state_dict().items())
    if name == "gemma3":
        projector = run_config_of(mcore_ckpt_ext.open_checkpoint(run).files.folder)["model"]["vision_projector_config"]
        assert [projector[key] for key in ("image_size", "patch_dim", "tokens_per_image")] == [56, 14, 4]
    if name == "qwen3_vl":
        one = "model.visual.pos_embed.weight"
        save_file({**tensors(source), one: 1 + expected[one]}, source / "model.safetensors")
        (weights,) = compare(source, back).kinds
        mcore_ckpt_ext.convert(run, tmp_path / "fp8", mcore_ckpt_ext.HuggingFace(quantize="fp8-block"))
        found = {label for label, tensor in tensors(tmp_path / "fp8").items() if tensor.dtype == torch.float8_e4m3fn}
        assert len(found) == 14  # linear layers of the language model, in two layers
        assert not any("visual" in label for label in found)
        again = mcore_ckpt_ext.convert(tmp_path / "fp8", tmp_path / "of fp8", mcore_ckpt_ext.TorchDist(loop="bridge"))
        assert not any("left out" in note for note in again.notes)
        stored = tensors(tmp_path / "fp8")
        save_file({**stored, one: stored[one].to(torch.float8_e4m3fn)}, tmp_path / "fp8" / "model.safetensors")
        with pytest.raises(UnsupportedCheckpointError, match=f"the vision tower is quantized.*{re.escape(one)}"):
            mcore_ckpt_ext.convert(tmp_path / "fp8", tmp_path / "none", mcore_ckpt_ext.TorchDist(loop="bridge"))
        assert [found.name for found in weights.different] == [one]
        file = back / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "vision_config": {**config["vision_config"], "num_heads": 4}}))
        with pytest.raises(
            UnsupportedCheckpointError, match="another model than the trained one.*num_heads is 4, not 2"
        ):
            mcore_ckpt_ext.convert(run, tmp_path / "none", mcore_ckpt_ext.HuggingFace(vocab_size=250, tokenizer=back))


def test_mismatches_with_the_vision_tower_are_named() -> None:
    """The error names missing tensors, unsupported keys of the vision tower, and invalid numbers of heads."""
    tower, vision = VISION_TOWERS["qwen3_vl"], {"hidden_act": "gelu_pytorch_tanh", "num_heads": 2}
    names = {ours.replace("*", "0"): (6,) for ours in (rule.ours for rule in tower.rules)}
    del names["vision_model.decoder.deepstack_merger_list.0.patch_norm.bias"]
    assert tower.mismatches({}, names)[0] == "no vision_model.decoder.deepstack_merger_list.0.patch_norm.bias"
    whole = {"vision_config": vision, "text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}}
    assert tower.provider_fields(whole)["mrope_section"] == [1, 1, 2]
    for key, value in (("hidden_act", "silu"), ("rope_parameters", {"rope_theta": 5.0})):
        with pytest.raises(
            UnsupportedCheckpointError, match=f"no such model.*{'rope_theta' if 'rope' in key else key}"
        ):
            tower.provider_fields({**whole, "vision_config": {**vision, key: value}})
    qkv = "vision_model.decoder.layers.3.self_attention.linear_qkv.weight"
    rows = [region.offsets[0] for region in tower.tensor(qkv, (12, 5), vision).regions]
    assert rows == [0, 6, 2, 8, 4, 10]  # queries, keys, values of two heads, from two rows each
    with pytest.raises(UnsupportedCheckpointError, match="do not match the number of heads.*12 rows, 5 heads"):
        tower.tensor(qkv, (12, 5), {"num_heads": 5})
    text = "language_model.decoder.layers.0.self_attention"
    assert vision_model_type({*names, f"{text}.linear_qkv.weight"}) == "qwen3_vl"
    assert vision_model_type({*names, f"{text}.in_proj.weight.query"}) is None  # Qwen3.5
    square = HuggingFaceTensor("model.layers.0.mlp.experts.down_proj", (4, 8, 8), ())
    with pytest.raises(UnsupportedCheckpointError, match="recognized by their shape.*8 x 8"):
        turned_stack(square)


def test_the_whole_for_megatron_bridge(tmp_path: Path) -> None:
    """Names are those of Megatron-Bridge's mapping (models/qwen_vl/qwen25_vl_bridge.py, commit 067f987d)."""
    source, back = tmp_path / "whole", tmp_path / "back"
    save_whole("qwen2_5_vl", source)
    mcore_ckpt_ext.convert(source, tmp_path / "run", mcore_ckpt_ext.TorchDist(loop="bridge"))
    run = mcore_ckpt_ext.open_checkpoint(tmp_path / "run")
    names = set(run.names("weight"))
    assert names >= MAPPED
    assert {name for name in names if not name.startswith("language_model.")} == {
        name for name in tensors(source) if name.startswith("visual.")
    }
    model = run_config_of(run.files.folder)["model"]
    assert model["_target_"] == "megatron.bridge.models.qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider"
    assert (model["position_embedding_type"], model["mrope_section"]) == ("mrope", [1, 1, 2])
    assert model["vision_config"]["fullatt_block_indexes"] == [0]
    report = mcore_ckpt_ext.convert(tmp_path / "run", back, mcore_ckpt_ext.HuggingFace())
    assert not any("left out" in note for note in report.notes)
    assert_same_tensors(source, back)
    assert compare(source, tmp_path / "run").equal
    before, after = (AutoConfig.from_pretrained(folder).to_dict() for folder in (source, back))
    assert {key for key in before if before[key] != after[key]} <= {"dtype", "_name_or_path"}
    shutil.rmtree(run.files.folder / "tokenizer")
    with pytest.raises(UnsupportedCheckpointError, match="described only in config.json.*--tokenizer FOLDER"):
        mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "none", mcore_ckpt_ext.HuggingFace(vocab_size=250))
    config = json.loads((source / "config.json").read_text())
    for part, key, value in (("vision_config", "depth", 2), ("text_config", "rms_norm_eps", 0.5)):
        (source / "config.json").write_text(json.dumps({**config, part: {**config[part], key: value}}))
        with pytest.raises(UnsupportedCheckpointError, match=f"describes another model.*{key} is {value}"):
            mcore_ckpt_ext.convert(
                tmp_path / "run", tmp_path / "none", mcore_ckpt_ext.HuggingFace(vocab_size=250, tokenizer=source)
            )
    with pytest.raises(UnsupportedCheckpointError, match="rms_norm_eps|depth is 2"):
        (source / "config.json").write_text(
            json.dumps({**config, "vision_config": {**config["vision_config"], "depth": 2}})
        )
        mcore_ckpt_ext.convert(source, tmp_path / "none", mcore_ckpt_ext.TorchDist(loop="bridge"))
    evil = {**config["vision_config"], "norm": "${oc.env:HOME}"}
    (source / "config.json").write_text(json.dumps({**config, "vision_config": evil}))
    with pytest.raises(UnsupportedCheckpointError, match="a value of an unsupported kind"):
        mcore_ckpt_ext.convert(source, tmp_path / "none", mcore_ckpt_ext.TorchDist(loop="bridge"))
