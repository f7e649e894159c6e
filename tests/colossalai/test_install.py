"""Test that the patch can be installed and removed completely, and that the subclasses do the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import colossalai.zero.gemini.utils
import pytest
import torch
from colossalai.zero import GeminiDDP, GeminiOptimizer
from colossalai_on_cpu import ranks
from torch import nn

from mcore_ckpt_ext import zero_strict_state_dict as strict
from mcore_ckpt_ext.colossalai import classes
from mcore_ckpt_ext.colossalai.replaced import ORIGINAL
from tests.colossalai.jobs import gathered_masters, refusal, same_bits, train, wrap
from tests.colossalai.models import TinyGPT

REPOSITORY = Path(__file__).parents[2]


def test_install_and_uninstall_as_often_as_one_likes() -> None:
    from colossalai.booster.plugin.gemini_plugin import GeminiCheckpointIO

    patched = (GeminiDDP, GeminiOptimizer, GeminiCheckpointIO)
    before = [dict(vars(cls)) for cls in patched]
    static = colossalai.zero.get_static_torch_model
    try:
        for _ in range(2):
            strict.install()
            strict.install(dtype="compute")
        assert vars(GeminiDDP)["_non_strict_state_dict"] is before[0]["state_dict"]
        assert vars(GeminiDDP)["_strict_dtype"] == "compute"
        assert [patch_point.state for patch_point in strict.status()] == ["patched"] * 3 + ["not patched"] * 5
        assert colossalai.zero.get_static_torch_model is strict.get_static_torch_model
        assert colossalai.zero.gemini.utils.get_static_torch_model is strict.get_static_torch_model
    finally:
        strict.uninstall()
        strict.uninstall()
    assert [dict(vars(cls)) for cls in patched] == before
    assert colossalai.zero.get_static_torch_model is colossalai.zero.gemini.utils.get_static_torch_model is static
    assert [patch_point.state for patch_point in strict.status()] == ["not patched"] * 8


def test_uninstall_keeps_later_patches() -> None:
    before = vars(GeminiDDP)["state_dict"]
    strict.install()

    def on_top(self: Any) -> None:
        pass

    try:
        GeminiDDP.state_dict = on_top
        strict.uninstall()
        assert vars(GeminiDDP)["state_dict"] is on_top
    finally:
        GeminiDDP.state_dict = before


@pytest.mark.parametrize("target", [target for targets in classes.PLUGINS.values() for target in targets])
def test_methods_are_called_as_those_that_they_replace(target: classes.Target) -> None:
    cls = classes.find(target)
    assert cls is not None
    attributes = target.methods.namespace(cls)
    replaced = [name for name in attributes if f"{ORIGINAL}{name}" in attributes]
    assert replaced
    for name in replaced:
        theirs = _named_parameters(attributes[f"{ORIGINAL}{name}"])
        ours = signature(attributes[name])
        owner = theirs[: theirs[:1] == ["self"]]
        passed = theirs[len(owner) :]
        by_position = ours.bind(*owner, *passed).arguments
        by_name = ours.bind(*owner, **dict(zip(passed, passed, strict=True))).arguments
        named = [*by_position.items(), *by_name.items()]
        assert all(value in (key, "self") for key, value in named if isinstance(value, str)), name


def test_the_function_takes_what_the_method_of_a_module_does() -> None:
    assert {*_named_parameters(nn.Module.state_dict)} - {"self"} <= {*_named_parameters(strict.zero_strict_state_dict)}


def _named_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters, without those of `*args` and `**kwargs`."""
    collecting = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [name for name, parameter in signature(function).parameters.items() if parameter.kind not in collecting]


def test_a_dtype_that_is_none_is_refused_before_anything_is_patched() -> None:
    with pytest.raises(ValueError, match='"master", "compute"'):
        strict.install(dtype="fp32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="low_level_zero"):
        strict.install(plugins=("gemini", "torch_ddp"))
    assert "_non_strict_state_dict" not in vars(GeminiDDP)


@pytest.mark.parametrize("dtype", ["master", "compute", torch.float32])
def test_the_dtype_of_install_is_the_default(dtype: Any) -> None:
    def job() -> None:
        strict.install(dtype=dtype)
        model, _ = wrap()
        expected = torch.bfloat16 if dtype == "compute" else torch.float32
        assert {value.dtype for value in model.state_dict(only_rank_0=False).values()} == {expected}
        assert {value.dtype for value in model.state_dict(None, "", False, False, torch.float64).values()} == {
            torch.float64
        }

    ranks.run(1, job)


def test_the_fifth_argument_is_strict_as_when_colossalai_had_it() -> None:
    def job() -> None:
        strict.install()
        model, _ = wrap()
        own = model._non_strict_state_dict(only_rank_0=False)
        ours = model.state_dict(only_rank_0=False)
        assert same_bits(model.state_dict(None, "", False, False, False), own)
        assert same_bits(model.state_dict(None, "", False, False, True), ours)
        for call in (
            lambda: model.state_dict(dtype=True),
            lambda: list(model.state_dict_shard(dtype=False)),
            lambda: strict.get_static_torch_model(model, dtype=True),
        ):
            assert "strict is a keyword" in refusal(call)
        assert "at most 5" in refusal(lambda: model.state_dict(None, "", False, False, True, None))
        # ColossalAI's own cuts ties, and cannot compute where a layer has no bias.
        static = colossalai.zero.get_static_torch_model(zero_ddp_model=model)
        assert static.lm_head.weight is static.wte.weight
        assert static(torch.arange(4).view(1, 4)).shape == (1, 4, 97)

    ranks.run(1, job)


def test_a_version_whose_chunks_are_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # As 0.1.13 has it: nn/parallel/data_parallel.py, with these methods, and no zero/gemini/gemini_ddp.py.
    class ZeroDDP:
        def state_dict(self) -> None: ...
        def load_state_dict(self) -> None: ...

    home = ModuleType("colossalai.nn.parallel.data_parallel")
    home.ZeroDDP = ZeroDDP  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "colossalai.zero.gemini.gemini_ddp", None)
    monkeypatch.setitem(sys.modules, "colossalai.nn.parallel", ModuleType("colossalai.nn.parallel"))
    monkeypatch.setitem(sys.modules, home.__name__, home)
    text = refusal(strict.install)
    assert "0.2.0 or later" in text
    assert "_non_strict_state_dict" not in vars(ZeroDDP)


def test_not_strict_is_the_untouched_original() -> None:
    def job() -> None:
        model, optimizer = wrap()
        train(model, optimizer, range(2))
        own = model.state_dict(only_rank_0=False)
        strict.install()
        assert same_bits(model.state_dict(only_rank_0=False, strict=False), own)
        assert same_bits(model._non_strict_state_dict(only_rank_0=False), own)
        own_shards = [shard for shard, _ in model._non_strict_state_dict_shard(only_rank_0=False)]
        shards = [shard for shard, _ in model.state_dict_shard(only_rank_0=False, strict=False)]
        assert all(same_bits(a, b) for a, b in zip(shards, own_shards, strict=True))

    ranks.run(2, job)


@pytest.mark.parametrize("patched", [False, True])
def test_subclasses(patched: bool) -> None:
    def job() -> None:
        from colossalai.nn.optimizer import HybridAdam

        if patched:
            strict.install(dtype="compute")
        torch.manual_seed(0)
        chunks = {2: {"chunk_size": 2048, "keep_gathered": False}}
        model = strict.StrictGeminiDDP(
            TinyGPT(), chunks, chunk_init_device=torch.device("cpu"), mixed_precision=torch.bfloat16
        )
        optimizer = strict.StrictGeminiOptimizer(HybridAdam(model.parameters(), lr=1e-2), model)
        assert isinstance(model, GeminiDDP)
        train(model, optimizer, range(2))
        state = model.state_dict(only_rank_0=False)
        masters = gathered_masters(model)
        assert same_bits({name: state[name] for name in masters}, masters)
        assert {value.dtype for value in model._non_strict_state_dict(only_rank_0=False).values()} == {torch.bfloat16}
        model.load_state_dict(state)
        optimizer.load_state_dict(optimizer.state_dict(only_rank_0=False))
        assert patched == hasattr(GeminiDDP, "_non_strict_state_dict")

    ranks.run(2, job)


def test_the_patch_for_forks_makes_a_copy_strict(tmp_path: Path) -> None:
    name = "colossalai.booster.plugin.gemini_plugin"
    patched = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
    patched.parent.mkdir(parents=True)
    shutil.copy(Path(colossalai.__file__).parent / "booster" / "plugin" / "gemini_plugin.py", patched)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    assert "mcore_ckpt_ext" not in patched.read_text()
    patch = REPOSITORY / "patches" / "colossalai-v0.5.0.patch"
    subprocess.run(["git", "apply", "--unidiff-zero", str(patch)], cwd=tmp_path, check=True)

    def job() -> bool:
        import_module("colossalai.booster")  # with its own copy of the file
        specification = spec_from_file_location(name, patched)
        assert specification is not None and specification.loader is not None
        assert "_non_strict_state_dict" not in vars(GeminiDDP)
        plugin = sys.modules[name] = module_from_spec(specification)
        specification.loader.exec_module(plugin)
        assert "_non_strict_save_sharded_optimizer" in vars(plugin.GeminiCheckpointIO)
        return plugin.GeminiDDP is GeminiDDP and "_non_strict_state_dict" in vars(GeminiDDP)

    assert ranks.run(1, job) == [True]
