"""Test contradictory checkpoints: state that is stored twice, partly, or under another parameter's number."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.param_group_assignment import group_that_holds
from mcore_ckpt_ext.formats.portable_state import once
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.live.compatibility import check_stored_once
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.targets import TARGETS
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.damage import flip, without_digests

MATRIX = "decoder.layers.mlp.linear_fc2.weight"


class Edited:
    """A copy of a torch_dist checkpoint, of which the index may be changed and records added."""

    def __init__(self, name: str, folder: Path) -> None:
        self.run = fixture_named(name).copy_to(folder / "source").run
        self.iteration = self.run / "iter_0000004"
        for path in self.iteration.iterdir():
            path.chmod(0o644)
        self.index: Any = pickle.loads((self.iteration / ".metadata").read_bytes())

    def save(self) -> Path:
        (self.iteration / ".metadata").write_bytes(pickle.dumps(self.index))
        return self.run

    def remove(self, key: str) -> None:
        del self.index.state_dict_metadata[key]
        for place in [place for place in self.index.storage_data if place.fqn == key]:
            del self.index.storage_data[place]

    def add(self, key: str, offsets: tuple[int, ...], values: Any) -> None:
        """One more record, in a file of its own."""
        name = f"__9_{len(list(self.iteration.iterdir()))}.distcp"
        archive = io.BytesIO()
        torch.save(values, archive)
        (self.iteration / name).write_bytes(archive.getvalue())
        self.index.storage_data[MetadataIndex(key, torch.Size(offsets))] = _StorageInfo(name, 0, archive.tell())


def errors_of(run: Path, *, quick: bool = False) -> list[str]:
    return [f"{found.where}: {found.what}" for found in verify(run, quick=quick).findings if found.severity == "error"]


@pytest.mark.parametrize("key", [MATRIX, f"optimizer.state.exp_avg.{MATRIX}"])
def test_values_that_are_there_twice(key: str, tmp_path: Path) -> None:
    """Torch's own loader takes the last, a plan the first: neither is known to be right."""
    edited = Edited("p04", tmp_path)
    stored = edited.index.state_dict_metadata[key]
    part = torch.Size((1, 16, *stored.size[2:]))
    stored.chunks.append(ChunkStorageMetadata(torch.Size((0, 16, 0)), part))
    edited.add(key, (0, 16, 0), torch.ones(part, dtype=stored.properties.dtype))
    run = edited.save()
    assert any("stored more than once" in found for found in errors_of(run))
    for target in ("torch_dist", "legacy", "canonical", *(["hf"] if key == MATRIX else [])):
        with pytest.raises(UnreadableCheckpointError, match="contradicts itself.*stored more than once"):
            mcore_ckpt_ext.convert(run, tmp_path / "out", TARGETS[target]())
    with pytest.raises(UnreadableCheckpointError, match="contradicts itself"):
        compare(run, fixture_named("p04").run)
    assert not (tmp_path / "out").exists()
    check_stored_once(open_checkpoint(fixture_named("p04").run))
    with pytest.raises(UnreadableCheckpointError, match=f"more than once.*overlapping chunks of {re.escape(key)}"):
        check_stored_once(open_checkpoint(run))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("p41", kind) for kind in ("fp32_param", "exp_avg", "exp_avg_sq")]
    + [("p43", "fp32_param"), ("p43", "momentum_buffer"), ("p42", "exp_avg"), ("p04", "exp_avg")],
)
def test_a_parameter_with_part_of_its_state(name: str, kind: str, tmp_path: Path) -> None:
    edited = Edited(name, tmp_path)
    edited.remove(f"optimizer.state.{kind}.{MATRIX}")
    run = edited.save()
    said = re.compile(rf"but no ([a-z_ ]+ or )?{kind}\b")
    assert len(list(filter(said.search, errors_of(run)))) == 4  # layers
    assert any(map(said.search, errors_of(run, quick=True)))
    with pytest.raises(UnreadableCheckpointError, match=said):
        mcore_ckpt_ext.convert(run, tmp_path / "out", mcore_ckpt_ext.TorchDist())


@pytest.mark.parametrize("name", ["p01", "p04"])
def test_second_moments_that_are_gone_do_not_make_it_another_optimizer(name: str, tmp_path: Path) -> None:
    edited = Edited(name, tmp_path)
    for key in [key for key in edited.index.state_dict_metadata if "exp_avg_sq" in key]:
        edited.remove(key)
    run = edited.save()
    assert any("but no exp_avg_sq" in found for found in errors_of(run))
    with pytest.raises(UnreadableCheckpointError, match="but no exp_avg_sq"):
        mcore_ckpt_ext.convert(run, tmp_path / "out", mcore_ckpt_ext.TorchDist())


def test_a_bucket_that_lacks_a_moment_is_seen_by_metadata_alone(tmp_path: Path) -> None:
    edited = Edited("p01", tmp_path)
    keys = [key for key in edited.index.state_dict_metadata if key.endswith("exp_avg")]
    edited.remove(keys[0])
    assert any("its exp_avg is missing" in found for found in errors_of(edited.save(), quick=True))


def test_state_of_a_parameter_that_the_model_lacks(tmp_path: Path) -> None:
    edited = Edited("p04", tmp_path)
    for kind in ("exp_avg", "exp_avg_sq", "fp32_param"):
        whole = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((4,)))]
        like = edited.index.state_dict_metadata[f"optimizer.state.exp_avg.{MATRIX}"]
        key = f"optimizer.state.{kind}.decoder.stranger.weight"
        edited.index.state_dict_metadata[key] = type(like)(like.properties, torch.Size((4,)), whole)
        edited.add(key, (0,), torch.zeros(4))
    run = edited.save()
    assert any("decoder.stranger.weight" in found and "no such parameter" in found for found in errors_of(run))
    with pytest.raises(UnreadableCheckpointError, match="no such parameter.*decoder.stranger.weight"):
        mcore_ckpt_ext.convert(run, tmp_path / "out", mcore_ckpt_ext.TorchDist())


def legacy_of(folder: Path) -> Fixture:
    return fixture_named("p08b").copy_to(folder / "legacy")


def edit_rank(fixture: Fixture, rank: str, change: Any) -> None:
    file = fixture.iteration / rank / "model_optim_rng.pt"
    file.chmod(0o644)
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def test_legacy_layers_that_are_gone_are_not_made_up_for_by_those_behind(tmp_path: Path) -> None:
    fixture = legacy_of(tmp_path)

    def without_layer(state: Any) -> None:
        for name in [name for name in state["model"] if "layers.0." in name]:
            del state["model"][name]

    edit_rank(fixture, "mp_rank_00_001", without_layer)
    with pytest.raises(
        UnreadableCheckpointError, match=r"another number of layers.*3, by stage 1 \+ 0 \+ 1 \+ 1.*expected: 4"
    ):
        mcore_ckpt_ext.convert(fixture.run, tmp_path / "out", mcore_ckpt_ext.HuggingFace(vocab_size=128))
    assert any("another number of layers" in found for found in errors_of(fixture.run))


def test_a_legacy_layer_too_many_does_not_shift_those_behind(tmp_path: Path) -> None:
    fixture = legacy_of(tmp_path)
    stray = "decoder.layers.1.mlp.linear_fc1.bias"
    edit_rank(fixture, "mp_rank_00_001", lambda state: state["model"].update({stray: torch.zeros(128)}))
    with pytest.raises(UnreadableCheckpointError, match=r"another number of layers.*5, by stage 1 \+ 2 \+ 1 \+ 1"):
        mcore_ckpt_ext.convert(fixture.run, tmp_path / "out", mcore_ckpt_ext.TorchDist())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.update(iteration=3), "found: iteration 3; expected: 4, as in mp_rank_00_000"),
        (
            lambda state: state["opt_param_scheduler"].update(num_steps=48),
            "found: opt_param_scheduler.num_steps 48; expected: 32",
        ),
        (lambda state: vars(state["args"]).update(swiglu=True), "found: args.swiglu True; expected: False"),
    ],
    ids=["iteration", "scheduler", "job"],
)
def test_a_legacy_file_of_another_iteration(change: Any, said: str, tmp_path: Path) -> None:
    fixture = legacy_of(tmp_path)
    edit_rank(fixture, "mp_rank_00_001", change)
    with pytest.raises(UnreadableCheckpointError, match=f"not written at the same time.*{said}.*mp_rank_00_001"):
        mcore_ckpt_ext.convert(fixture.run, tmp_path / "out", mcore_ckpt_ext.TorchDist())
    assert any("not written at the same time" in found for found in errors_of(fixture.run))


def test_a_legacy_rank_of_experts_that_is_gone(tmp_path: Path) -> None:
    """All tensor and pipeline ranks are there: its experts were left out, and the rest called sound."""
    source, run = fixture_named("p09").run, tmp_path / "legacy"
    mcore_ckpt_ext.convert(source, run, mcore_ckpt_ext.Legacy(pipeline_model_parallel_size=2))
    gone = sorted(run.rglob("mp_rank_*"))[-1]
    assert gone.name.endswith("_001_001")
    shutil.rmtree(gone)
    assert any("rank folders of its own layout" in found and "expert 1" in found for found in errors_of(run))
    with pytest.raises(UnreadableCheckpointError, match="rank folders of its own layout.*expert 1"):
        mcore_ckpt_ext.convert(run, tmp_path / "out", mcore_ckpt_ext.TorchDist())


def exchange(iteration: Path, one: str, other: str) -> None:
    (iteration / one).rename(iteration / "apart")
    (iteration / other).rename(iteration / one)
    (iteration / "apart").rename(iteration / other)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("p08b", "mp_rank_00_001", "mp_rank_00_002"),
        ("p08c", "mp_rank_00", "mp_rank_01"),
        ("p09", "mp_rank_00_000_000", "mp_rank_00_000_001"),
    ],
)
def test_legacy_files_of_another_rank(name: str, one: str, other: str, tmp_path: Path) -> None:
    """Their masters round to their weights; but layers, rows or experts would take each other's places."""
    if name == "p09":
        run = tmp_path / "run"
        mcore_ckpt_ext.convert(fixture_named(name).run, run, mcore_ckpt_ext.Legacy())
        iteration = run / "iter_0000004"
    else:
        fixture = fixture_named(name).copy_to(tmp_path / "legacy")
        run, iteration = fixture.run, fixture.iteration
    assert not errors_of(run)
    exchange(iteration, one, other)
    with pytest.raises(UnreadableCheckpointError, match=f"mixed up; found: a file that rank .*{one}"):
        mcore_ckpt_ext.convert(run, tmp_path / "out", mcore_ckpt_ext.TorchDist())
    assert any("mixed up" in found for found in errors_of(run))
    exchange(iteration, one, other)
    shutil.rmtree(iteration / other)
    shutil.copytree(iteration / one, iteration / other)
    with pytest.raises(UnreadableCheckpointError, match=f"mixed up; found: the same content as in {one}.*{other}"):
        mcore_ckpt_ext.convert(run, tmp_path / "out", mcore_ckpt_ext.TorchDist())


def test_legacy_files_that_one_process_wrote_for_all_ranks(tmp_path: Path) -> None:
    """As those of Megatron's own converters, which leave one rank in all of them."""
    fixture = legacy_of(tmp_path)
    for folder in sorted(path.name for path in fixture.iteration.glob("mp_rank_*")):
        edit_rank(fixture, folder, lambda state: vars(state["args"]).update(rank=0))
    assert not errors_of(fixture.run)


@pytest.mark.parametrize("setting", ["lr", "betas", "stranger"])
def test_settings_of_a_parameter_group_that_differ_between_ranks(setting: str, tmp_path: Path) -> None:
    """The last dp_group_idx of p01; which of both is right is not known."""
    edited = Edited("p01", tmp_path)
    places = [place for place in edited.index.storage_data if ".optimizer/shard" in place.fqn]
    for place in places[:1] if setting != "stranger" else places:
        stored = edited.index.storage_data[place]
        data = (edited.iteration / stored.relative_path).read_bytes()[stored.offset :][: stored.length]
        state = torch.load(io.BytesIO(data), weights_only=False)
        for group in (group for child in state for group in child["param_groups"]):
            group[setting] = (0.0, 0.0) if setting == "betas" else float(places.index(place))
        edited.add(place.fqn, (), state)
        edited.index.storage_data[place] = edited.index.storage_data.pop(MetadataIndex(place.fqn, torch.Size(())))
    run = edited.save()
    expected = f"different settings of the same parameter group.*{setting}"
    with pytest.raises(UnreadableCheckpointError, match=expected):
        mcore_ckpt_ext.convert(run, tmp_path / "out", mcore_ckpt_ext.TorchDist())
    assert any("different settings" in found for found in errors_of(run))


def test_canonical_files_are_what_their_index_says(tmp_path: Path) -> None:
    run = tmp_path / "run"
    mcore_ckpt_ext.convert(fixture_named("p04").run, run, mcore_ckpt_ext.Canonical())
    (file,) = run.glob("*.safetensors")
    tensors = load_file(file)
    save_file({key: value for key, value in tensors.items() if "layers.2." not in key}, file)
    assert any("does not have one checksum for each array" in found for found in errors_of(run))
    del tensors["checksums"]
    save_file({key: value for key, value in tensors.items() if "layers.2." not in key}, file)
    assert any("the index and the files disagree" in found for found in errors_of(run))
    with pytest.raises(UnreadableCheckpointError, match="the index and the files disagree"):
        mcore_ckpt_ext.convert(run, tmp_path / "out", mcore_ckpt_ext.Legacy())
    save_file({**tensors, "weight.stranger": torch.zeros(2)}, file)
    with pytest.raises(UnreadableCheckpointError, match=r"disagree about the tensors.*weight\.stranger"):
        mcore_ckpt_ext.open_checkpoint(run)
    index = json.loads((run / "model.safetensors.index.json").read_text())
    index["weight_map"]["weight.stranger"] = file.name
    (run / "model.safetensors.index.json").write_text(json.dumps(index))
    assert mcore_ckpt_ext.open_checkpoint(run).tensor("weight", "stranger").read().tolist() == [0, 0]
    save_file({"weight.other": torch.zeros(2)}, run / "stray.safetensors")
    assert ("stray.safetensors", "every key known") in [(found.where, found.check) for found in verify(run).findings]


def with_arguments(folder: Path, iteration: int = 4, **changed: object) -> Path:
    fixture = fixture_named("p04").copy_to(folder / "source")
    file = fixture.iteration / "common.pt"
    file.chmod(0o644)
    common = torch.load(file, weights_only=False)
    vars(common["args"]).update(changed)
    torch.save({**common, "iteration": iteration}, file)
    return fixture.run


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_layers": 3}, "the arguments say num_layers 3, but 4 are stored"),
        ({"iteration": 77}, "it records iteration 77, but its folder is iter_0000004"),
    ],
)
def test_contradicted_metadata_is_reported(changed: Any, said: str, tmp_path: Path) -> None:
    run = with_arguments(tmp_path, **changed)
    assert said in [found.what for found in verify(run, quick=True).findings]


def test_unknown_arguments_are_named_for_a_hugging_face_folder(tmp_path: Path) -> None:
    """Those of a fork may change what the model computes."""
    for folder, changed in (("plain", {}), ("fork", {"embedding_multiplier": 2.0, "never_used": None})):
        run = with_arguments(tmp_path / folder, **changed)
        report = mcore_ckpt_ext.convert(run, tmp_path / folder / "hf", mcore_ckpt_ext.HuggingFace(vocab_size=128))
        named = [note for note in report.notes if "unknown arguments" in note]
        assert len(named) == (folder == "fork")
        assert not named or named[0].endswith("embedding_multiplier 2.0")


def test_a_learning_rate_that_is_no_number_is_reported_and_compared(tmp_path: Path) -> None:
    fixture = legacy_of(tmp_path)

    def diverged(state: Any) -> None:
        for group in state["optimizer"]["optimizer"]["param_groups"]:
            group["lr"] = float("nan")

    for folder in sorted(path.name for path in fixture.iteration.glob("mp_rank_*")):
        edit_rank(fixture, folder, diverged)
    assert [(found.where, found.what) for found in verify(fixture.run).findings] == [("parameter groups", "lr is nan")]
    facts = {fact.what: (fact.a, fact.b) for fact in compare(fixture.run, fixture_named("p08b").run).facts}
    assert facts["lr"][0] == "nan"


def with_common(folder: Path, change: Any) -> Path:
    fixture = fixture_named("p04").copy_to(folder / "source")
    file = fixture.iteration / "common.pt"
    file.chmod(0o644)
    common = torch.load(file, weights_only=False)
    change(common)
    torch.save(common, file)
    return fixture.run


def groups_in(common: Any) -> Any:
    return common["optimizer"]["optimizer"]["param_groups"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda common: common.update(iteration=2.5), "invalid iteration number in the checkpoint; found: 2.5"),
        (lambda common: common.update(iteration=-5), "invalid iteration number in the checkpoint; found: -5"),
        (lambda common: common.update(iteration=True), "invalid iteration number in the checkpoint; found: True"),
        (lambda common: common["optimizer"].update(optimizer=torch.ones(2)), "the state of an optimizer is not as"),
        (lambda common: common["optimizer"]["optimizer"].update(param_groups=None), "a group that is a NoneType"),
        (lambda common: groups_in(common).append(torch.ones(2)), "parameter groups of the optimizer are not as"),
        (lambda common: groups_in(common)[0].update(wd_mult=torch.ones(2)), "are not as Megatron.*found: wd_mult"),
        (lambda common: groups_in(common)[0].pop("lr"), "a group has no lr"),
        (lambda common: groups_in(common)[1].update(eps=None), "eps is None"),
        (lambda common: common.update(opt_param_scheduler="x"), "it is a str"),
        (lambda common: common["opt_param_scheduler"].update(num_steps="32"), "num_steps is 32"),
    ],
)
def test_settings_that_cannot_be(change: Any, said: str, tmp_path: Path) -> None:
    run = with_common(tmp_path, change)
    assert any(re.search(said, found) for found in errors_of(run))
    with pytest.raises(UnreadableCheckpointError, match=said):
        mcore_ckpt_ext.convert(run, tmp_path / "out", mcore_ckpt_ext.TorchDist())
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda common: common.pop("opt_param_scheduler"), "scheduler: missing"),
        (lambda common: common["opt_param_scheduler"].update(max_lr=float("inf")), "scheduler: max_lr is inf"),
        (lambda common: groups_in(common).pop(0), "parameter groups: there is none with"),
        (
            lambda common: common.pop("iteration"),
            "it does not record its iteration: that of its folder",
        ),
        (lambda common: common.update(content_metadata=torch.ones(2)), ""),
        (lambda common: groups_in(common)[0].update(lr=torch.tensor(1e-3)), ""),
    ],
)
def test_reported_settings(change: Any, said: str, tmp_path: Path) -> None:
    run = with_common(tmp_path, change)
    result = verify(run)
    assert result.sound
    assert any(said in f"{found.where}: {found.what}" for found in result.findings) or not said
    report = mcore_ckpt_ext.convert(run, tmp_path / "out", mcore_ckpt_ext.TorchDist())
    assert any(said in note for note in report.notes)
    assert mcore_ckpt_ext.open_checkpoint(tmp_path / "out").job.iteration() == 4


@pytest.mark.parametrize("number", [0, 1])
def test_a_parameter_group_that_is_gone_is_no_other_groups(number: int, tmp_path: Path) -> None:
    """Megatron-FSDP's format has the settings beside each parameter: all would have those of the group that is left."""
    run = with_common(tmp_path, lambda common: groups_in(common).pop(number))
    with pytest.raises(
        UnsupportedCheckpointError, match="the parameter group of each parameter is unknown; found: 0 groups"
    ):
        mcore_ckpt_ext.convert(run, tmp_path / "out", mcore_ckpt_ext.FsdpDtensor())


def test_groups_without_multipliers_are_distinct_by_their_decay() -> None:
    """For `verify` as for `convert`: the scheduler writes the decay times a multiplier that the writer left out."""
    groups = [{"weight_decay": decay, "betas": (0.9, 0.99), "eps": 1e-8} for decay in (0.01, 0.0, 0.01)]
    assert once(groups) == groups[:2]


def test_norms_of_queries_and_keys_may_have_weight_decay() -> None:
    groups = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]
    names = {"decoder.layers.0.self_attention.q_layernorm.weight": 0, "decoder.final_layernorm.weight": 1}
    for name, number in names.items():
        assert group_that_holds(name, (8,), groups, JobArguments.of({"apply_wd_to_qk_layernorm": True})) == number
        assert group_that_holds(name, (8,), groups, JobArguments.of({})) == 1


def test_a_decoupled_learning_rate_distinguishes_groups() -> None:
    """Groups have no other mark since core_v0.16.0."""
    arguments = JobArguments.of({"lr": 1e-3, "decoupled_lr": 5e-4})
    groups = [{"wd_mult": 1.0, "is_decoupled_lr": False, "max_lr": rate} for rate in (1e-3, 5e-4)]
    names = ["decoder.layers.0.mlp.linear_fc1.weight", "language_model.output_layer.weight"]
    assert [group_that_holds(name, (8, 8), groups, arguments) for name in names] == [0, 1]


def test_masters_and_groups_of_different_parameters_are_no_sound_optimizer(tmp_path: Path) -> None:
    fixture = fixture_named("p08c").copy_to(tmp_path / "legacy")

    def exchanged(state: Any) -> None:
        one, other = state["optimizer"]["optimizer"]["param_groups"]
        one["params"], other["params"] = other["params"], one["params"]

    for folder in ("mp_rank_00", "mp_rank_01"):
        edit_rank(fixture, folder, exchanged)
    assert any("are not of the same parameters" in found for found in errors_of(fixture.run))


@pytest.mark.parametrize(
    ("change", "what", "values"),
    [
        (
            lambda common: groups_in(common)[0].update(betas=(0.5, 0.9)),
            "betas",
            ("(0.5, 0.9), (0.9, 0.999)", "(0.9, 0.999)"),
        ),
        (lambda common: common["opt_param_scheduler"].update(num_steps=48), "scheduled samples", ("48", "32")),
        (lambda common: vars(common["args"]).update(consumed_train_samples=48), "consumed samples", ("48", "32")),
    ],
)
def test_settings_that_differ_are_facts(change: Any, what: str, values: tuple[str, str], tmp_path: Path) -> None:
    run = with_common(tmp_path, change)
    facts = {fact.what: (fact.a, fact.b) for fact in compare(run, fixture_named("p04").run).facts}
    assert facts[what] == values
    same = {fact.what for fact in compare(fixture_named("p04").run, fixture_named("p04").run).facts}
    assert same == {"format", "layout", "iteration", "step", "lr"}


@pytest.mark.parametrize("key", ["missing", "param_groups", "chain", "source", "undistributed"])
def test_canonical_folders_say_which_part_is_gone(key: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    mcore_ckpt_ext.convert(fixture_named("p04").run, run, mcore_ckpt_ext.Canonical())
    about = json.loads((run / "common.json").read_text())
    about.pop(key, None)
    (without_digests(run) / "common.json").write_text(json.dumps(about))
    with nullcontext() if key == "missing" else pytest.raises(UnreadableCheckpointError, match=f"incomplete.*no {key}"):
        mcore_ckpt_ext.open_checkpoint(run)


@pytest.mark.parametrize("kind", ["weight", "exp_avg"])
def test_a_flipped_bit_of_a_canonical_checkpoint_shows(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    mcore_ckpt_ext.convert(fixture_named("p04").run, run, mcore_ckpt_ext.Canonical())
    assert errors_of(run) == []
    (told,) = [check for check in verify(run).checks if check.name == "checksums"]
    assert told.done
    (file,) = run.glob("*.safetensors")
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}  # they may be mapped
    key = f"{kind}.decoder.layers.1.mlp.linear_fc1.weight"
    flip(file, file.read_bytes().index(tensors[key].view(torch.uint8).numpy().tobytes()), 1)
    assert any("its checksum differs" in found for found in errors_of(run))
    with pytest.raises(UnreadableCheckpointError, match="its checksum differs"):
        mcore_ckpt_ext.convert(run, tmp_path / "out", mcore_ckpt_ext.Legacy())
    # Another tool may write the file anew, with the arrays in another order.
    save_file(tensors, file)
    assert errors_of(run) == []


def test_of_tensors_without_checksums_it_is_said(tmp_path: Path) -> None:
    """As in a folder that another program wrote."""
    run = tmp_path / "run"
    mcore_ckpt_ext.convert(fixture_named("p04").run, run, mcore_ckpt_ext.Canonical())
    (file,) = run.glob("*.safetensors")
    save_file({key: tensor for key, tensor in load_file(file).items() if key != "checksums"}, file)
    (told,) = [check for check in verify(run).checks if check.name == "checksums"]
    assert not told.done
    assert "is not detected" in told.extent
