"""Test the arguments of a job: known ones, refused ones, and their meaning for a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mcore_ckpt_ext import open_checkpoint
from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.families.flags import training_flags
from mcore_ckpt_ext.families.recognition import FAMILIES
from mcore_ckpt_ext.families.settings import Constant, Implies, Mapped
from mcore_ckpt_ext.job.arguments.kinds import REQUIRED
from mcore_ckpt_ext.job.arguments.table import ROWS
from mcore_ckpt_ext.job.job_arguments import FIELDS, JobArguments
from mcore_ckpt_ext.job.model_arguments import MODEL_ARGUMENTS, complete
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.versions import parse_version
from tests.harness.checkpoints import INTACT, RELEASES, Fixture, fixture_named

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8}


def test_absent_values_are_unset() -> None:
    job = JobArguments.of({"num_experts": None, "swiglu": True, "of_a_fork": 7})
    assert job.swiglu is True
    assert (job.num_experts, job.is_set("num_experts")) == (None, True)
    assert (job.normalization, job.is_set("normalization")) == (None, False)
    assert job.value("of_a_fork") == 7
    assert job.version is None
    with pytest.raises(UnsupportedCheckpointError, match="num_experts.*some file"):
        JobArguments.of({"num_experts": None}, source="some file").whole("num_experts")


def test_a_misspelt_argument_of_a_table_is_an_error() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="normalizaton"):
        JobArguments.of({}).value("normalizaton")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 10**12), ("num_layers", -1), ("num_layers", True), ("num_layers", "4"),
        pytest.param("num_layers", 10**5000, id="many digits"),
        ("num_experts", 1 << 40), ("world_size", 1 << 40), ("swiglu", 1), ("transformer_impl", ["local"]),
        ("layernorm_epsilon", float("nan")), ("layernorm_epsilon", {"_target_": "os.system"}), ("moe_layer_freq", 0),
        ("moe_layer_freq", [0, 2]), ("moe_layer_freq", []), ("window_size", 128), ("window_size", (1, 2, 3)),
        ("moe_aux_loss_coeff", [0.1, "x"]), ("kv_channels", 8.0), ("hybrid_layer_pattern", 5),
    ],
)  # fmt: skip
def test_a_value_that_no_job_can_have_is_refused(name: str, value: object) -> None:
    with pytest.raises(UnreadableCheckpointError, match=f"{name}.*some file") as caught:
        JobArguments.of({name: value}, source="some file")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "values", [{"num_layers": 1 << 14, "num_experts": 1 << 16}, {"num_layers": 3, "moe_layer_freq": [0, 1]}]
)
def test_values_that_contradict_each_other_are_refused(values: Mapping[str, Any]) -> None:
    with pytest.raises(UnreadableCheckpointError, match="an invalid value"):
        JobArguments.of(values)


def test_a_changed_job_is_checked_too_and_the_first_one_stays() -> None:
    job = JobArguments.of({**SIZES, "of_a_fork": 7}, source="some file")
    other = job.replace(num_layers=8)
    assert (job.num_layers, other.num_layers, other.raw["num_layers"]) == (4, 8, 8)
    assert (other.source, other.value("of_a_fork")) == ("some file", 7)
    with pytest.raises(UnreadableCheckpointError, match="num_layers"):
        job.replace(num_layers=-8)


@pytest.mark.parametrize("name", INTACT)
def test_every_real_checkpoint_s_are_taken(name: str) -> None:
    checkpoint = open_checkpoint(fixture_named(name).run)
    assert checkpoint.job.arguments().num_layers == checkpoint.job.args["num_layers"]
    assert checkpoint.job.arguments().version is None


def test_they_have_the_version_that_the_sidecar_records(damaged: Fixture) -> None:
    written = Sidecar("mcore_ckpt_ext 0.1.0", "0.16.1", 4, {}, ())
    (damaged.iteration / SIDECAR).write_text(written.to_json())
    assert open_checkpoint(damaged.run).job.arguments().version == (0, 16)


def test_the_layout_follows() -> None:
    layout = ParallelLayout.from_arguments(
        JobArguments.of({"tensor_model_parallel_size": 2, "data_parallel_size": 3, "context_parallel_size": 2})
    )
    assert (layout.world, layout.expert_tensor, layout.virtual_pipeline) == (12, 2, 1)


def test_a_model_is_complete_and_lists_its_arguments() -> None:
    job = JobArguments.of({**SIZES, "norm_epsilon": 1e-6, "use_rotary_position_embeddings": True, "of_a_fork": 7})
    model = complete(job)
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (256, 8, 8)
    assert (model.layernorm_epsilon, model.position_embedding_type) == (1e-6, "rope")
    assert model.as_dict()["of_a_fork"] == model.value("of_a_fork") == 7
    with pytest.raises(UnsupportedCheckpointError, match="max_position_embeddings"):
        model.require("max_position_embeddings")
    with pytest.raises(UnsupportedCheckpointError, match="hidden_size.*some file"):
        complete(JobArguments.of({"num_layers": 4}, source="some file"))


def test_a_model_with_unknown_query_groups_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="num_query_groups"):
        complete(JobArguments.of({**SIZES, "group_query_attention": True}))


def test_a_changed_model_is_another_one_and_has_the_same_arguments() -> None:
    model = complete(JobArguments.of(SIZES))
    assert (model.replace(num_layers=8).num_layers, model.num_layers) == (8, 4)
    with pytest.raises(TypeError, match="numlayers"):
        model.replace(numlayers=8)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_a_default_that_its_argument_can_have(name: str) -> None:
    values = ROWS[name].values
    assert values.default in (None, REQUIRED) or values.kind.accepts(values.default)


@pytest.mark.parametrize("fixture", RELEASES)
def test_a_row_is_of_the_releases_whose_jobs_have_its_argument(fixture: str) -> None:
    values = open_checkpoint(fixture_named(fixture).run).job.arguments().raw
    parsed = {name for name, row in ROWS.items() if RELEASES[fixture] in row.releases}
    assert parsed - values.keys() == set()
    assert {name for name in ROWS.keys() - parsed if values.get(name)} == set()


def test_every_argument_that_a_table_names_is_one() -> None:
    known = FIELDS | MODEL_ARGUMENTS.keys()
    for family in FAMILIES:
        for setting in family.settings:
            if isinstance(setting, Mapped):
                assert setting.argument in known
            elif isinstance(setting, Constant):
                assert set(setting.needed) <= known
            elif isinstance(setting, Implies):
                assert set(setting.values) <= known
    assert training_flags(complete(JobArguments.of({**SIZES, "num_experts": 4, "multi_latent_attention": True})))


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.16.1", (0, 16)), ("core_v0.12.1", (0, 12)), ("0.20.0rc0+abc", (0, 20)), ("v1.2", (1, 2)), ("unknown", None),
     ("0", None), ("", None), ("0." + "9" * 5000, None)],
)  # fmt: skip
def test_versions(text: str, version: tuple[int, int] | None) -> None:
    assert parse_version(text) == version
