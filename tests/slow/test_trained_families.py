"""Test that optimizers of Hugging Face families, trained by genuine Megatron, are resumed under another layout.

Each job starts from a converted folder, with the arguments that the conversion prints, as TP2, and EP2 for experts; and
is resumed as PP2. The live optimizer after the resume must equal the one that was saved, element for element.

Of Mamba 2, whose kernels run on GPUs only, the saved optimizer contains noise instead of trained states. Gemma, which
Megatron's arguments do not describe (`Family.bridge_only_reason`), is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import MOMENTS_VARIABLE, assemble

from mcore_ckpt_ext import TorchDist, convert
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.target import LayerSpec
from tests.harness.cases import Case, load_all, save_noise
from tests.harness.jobs import assert_same_optimizer, differing
from tests.harness.layouts import Layout, experts_over
from tests.harness.packages import with_transformer_engine
from tests.harness.published_configs import configuration, make_published
from tests.harness.turns import Results, Turn, run_in_turn

OWN_CODE = Path(__file__).parents[1] / "huggingface" / "own_code"
PUBLISHED = (
    "ministral3-3b", "devstral-2-123b", "stablelm", "mlc--stablelm-2-zephyr-1_6b", "gpt-bigcode", "deepseek-moe",
    "orion", "qwen1",
)  # fmt: skip
# Tiny models whose folders were built by the released code.
BUILT_BY_OWN_CODE = ("bailing_moe_v2", "chatglm", "deepseek", "exaone", "internlm2", "nemotron-nas", "sarvam_moe")
WITH_A_CLASS = ("glm", "gpt_neox", "hy_v3", "exaone_moe")
LOCAL: LayerSpec = "local"
ENGINE: LayerSpec = "transformer_engine"
# Megatron's own norms do not add one to the weight.
OF_ENGINE = "nemotron"


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("trained")
    folders = {name: root / f"{name}-model" for name in PUBLISHED}
    for name, folder in folders.items():
        make_published(configuration(name), folder)
    folders |= {name: OWN_CODE / name for name in BUILT_BY_OWN_CODE}
    folders |= {name: models[name] for name in WITH_A_CLASS}
    return _run(root, folders, LOCAL)


def _run(
    root: Path, folders: dict[str, Path], spec: LayerSpec, *plugins: Path, more: Sequence[str] = ()
) -> Results:  # fmt: skip
    turns = [turn for name, folder in folders.items() for turn in _turns(root, name, folder, spec, more)]
    return run_in_turn(root, turns, plugins)


def _opened(folder: Path, spec: LayerSpec) -> HuggingFaceCheckpoint:
    checkpoint = open_checkpoint(folder, transformer_impl=spec).format.reader
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    return checkpoint


def _turns(root: Path, name: str, folder: Path, spec: LayerSpec, more: Sequence[str]) -> list[Turn]:
    """Convert a model, and return the job that trains it and the one that resumes it."""
    convert(folder, root / f"{name}-release", TorchDist(transformer_impl=spec))
    checkpoint = _opened(folder, spec)
    flags = [str(folder / flag) if flag == "config.json" else flag for flag in checkpoint.training_flags()]
    more = [*flags, "--transformer-impl", spec, *more]
    before, after = Layout(2, 1, 2), Layout(1, 2, 2)
    if checkpoint.model_arguments.num_experts:
        before, after = experts_over(2, 1, 2, 2), experts_over(1, 2, 2, 1)
        more += ["--moe-token-dispatcher-type", "alltoall"]
    trained = Turn(root / name, before, load=root / f"{name}-release", saves=True, until=4, more=more)
    resumed = Turn(
        root / f"{name} resumed", after, load=trained.folder / "checkpoints", more=more,
        environment={MOMENTS_VARIABLE: "load"},
    )  # fmt: skip
    return [trained, resumed]


def _assert_resumed(jobs: Results, name: str) -> None:
    saved, resumed = jobs.job(name), jobs.job(f"{name} resumed")
    assert "loading release distributed checkpoint" in saved.output
    assert resumed.summary
    assert_same_optimizer(saved.at_save, resumed.at_load)


@pytest.mark.parametrize("name", [*PUBLISHED, *BUILT_BY_OWN_CODE, *WITH_A_CLASS])
def test_the_live_optimizer_equals_the_one_that_was_saved(name: str, trained: Results) -> None:
    _assert_resumed(trained, name)


def test_a_model_of_transformer_engine(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels have no backward pass here, so gradients are computed from weights."""
    with_transformer_engine(monkeypatch)
    jobs = _run(tmp_path, {OF_ENGINE: models[OF_ENGINE]}, ENGINE, launch.SYNTHETIC_TRAINING, more=["--clip-grad", "0"])
    _assert_resumed(jobs, OF_ENGINE)


def test_a_pure_mamba_model(models: dict[str, Path], tmp_path: Path) -> None:
    """Its model is built of Megatron's local modules, as that of `tests/jobs/test_hybrid.py`."""
    flags = [*_opened(models["mamba2"], ENGINE).training_flags(), "--spec", "hybrid_layers", "hybrid_stack"]
    run = save_noise(tmp_path / "saved", Layout(2, 1, 2), flags)
    flags += ["--hybrid-layer-pattern", "M|M"]
    cases = [Case("resumed", run, dump=tmp_path / "resumed")]
    outcomes = load_all(tmp_path / "job", Layout(1, 2, 2), cases, more=flags, are_rehearsed=True)
    assert [rank["error"] for rank in outcomes["resumed"]] == [None, None]
    assert differing(assemble(tmp_path / "saved" / "dump" / "after_save_0000004"), assemble(tmp_path / "resumed")) == []
