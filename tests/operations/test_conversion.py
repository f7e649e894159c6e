"""Test conversions of real checkpoints: each keeps every bit of every kind, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import (
    CheckpointError,
    DestinationError,
    ProofError,
    UnreadableCheckpointError,
    UsageError,
)  # fmt: skip
from mcore_ckpt_ext.storage.checksums import Checksums
from mcore_ckpt_ext.storage.torch_archive import TorchArchive
from mcore_ckpt_ext.targets import Target
from tests.harness.checkpoints import INTACT, Fixture, everything_in, fixture_named
from tests.harness.damage import MATRIX, flip, payload_position

Way = TypeVar("Way")
# Of each target of `legacy`: TP, PP, virtual stages, EP; what a model cannot take is left out by hand below.
LAYOUTS = [(1, 1, None, None), (2, 2, None, None), (4, 1, None, None), (1, 2, 2, None)]
LAYOUTS += [(2, 1, None, 4), (1, 4, None, 1)]
# Each differs from its neighbors in the common state, the metadata, the optimizer, its prefixes or its shapes.
VERSIONS = ["0.19.2", "0.16.1", "0.14.0", "0.13.1", "0.8.0"]
# What is written depends on the model alone, not on the format that it was read from: one source of each model, and of
# those without a distributed optimizer, is written in every way; each other source in one, the next in another.
IN_EVERY_WAY = ("p01", "p02", "p08c", "p09", "p12", "p21", "p22", "p32")


def ways(name: str, there_are: Sequence[Way]) -> list[Way]:
    """In which a source is written."""
    if name.startswith(tuple(f"{number}_" for number in IN_EVERY_WAY)):
        return list(there_are)
    return [there_are[INTACT.index(name) % len(there_are)]]


def assert_equal(run: Path, truth: dict[str, torch.Tensor]) -> None:
    """Bit for bit; a vocabulary that had to be padded further has zeros there."""
    found = everything_in(mcore_ckpt_ext.open_checkpoint(run))
    assert found.keys() >= truth.keys()
    for key, expected in truth.items():
        rows = expected.shape[0] if expected.dim() else None
        assert torch.equal(found[key][:rows] if rows else found[key], expected), key
        if rows:
            assert not found[key][rows:].any(), key


def is_plain(fixture: Fixture) -> bool:
    """Whether the job had no distributed optimizer: what is written of it has none either."""
    return "plain" in fixture.folder.name


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "version"), [(name, version) for name in INTACT for version in ways(name, VERSIONS)], ids=str
)
def test_torch_dist_for_every_version(name: str, version: str, tmp_path: Path) -> None:
    checkpoint_fixture = fixture_named(name)
    report = mcore_ckpt_ext.convert(
        checkpoint_fixture.run, tmp_path / "out", mcore_ckpt_ext.TorchDist(megatron_version=version)
    )
    assert_equal(tmp_path / "out", checkpoint_fixture.truth)
    written = mcore_ckpt_ext.open_checkpoint(tmp_path / "out")
    newer = tuple(map(int, version.split("."))) >= (0, 15)
    distributed = "fully_reshardable" if newer else "fully_sharded_model_space"
    assert written.optimizer.format() == ("no_distributed_optimizer" if is_plain(checkpoint_fixture) else distributed)
    assert (written.files.folder / "common.pt").exists() == (not version.startswith("0.19"))
    assert written.job.iteration() == 4
    masters = sum(value.numel() for key, value in checkpoint_fixture.truth.items() if key.startswith("fp32_param."))
    assert report.proven_elements == masters
    assert sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file()) == report.bytes_written


def legacy_cases() -> Iterator[tuple[str, tuple[int, int, int | None, int | None]]]:
    for name in INTACT:
        arguments = mcore_ckpt_ext.open_checkpoint(fixture_named(name).run).job.args
        experts, layers = bool(arguments.get("num_experts")), arguments["num_layers"]
        possible = [
            (tensor, pipeline, virtual, expert)
            for tensor, pipeline, virtual, expert in LAYOUTS
            if (experts or not expert) and layers % (pipeline * (virtual or 1)) == 0
        ]
        yield from ((name, layout) for layout in ways(name, possible))


@pytest.mark.parametrize(("name", "layout"), list(legacy_cases()), ids=str)
def test_legacy_and_back_under_every_layout(
    name: str, layout: tuple[int, int, int | None, int | None], tmp_path: Path
) -> None:
    source = fixture_named(name)
    tensor, pipeline, virtual, expert = layout
    target = mcore_ckpt_ext.Legacy(
        megatron_version="0.16.1",
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=expert,
    )
    mcore_ckpt_ext.convert(source.run, tmp_path / "legacy", target)
    written = mcore_ckpt_ext.open_checkpoint(tmp_path / "legacy")
    assert written.format.name == "torch"
    assert written.optimizer.format() == ("legacy_torch_per_parameter" if is_plain(source) else "legacy_torch")
    assert (written.job.layout.tensor, written.job.layout.pipeline) == (tensor, pipeline)
    assert_equal(tmp_path / "legacy", source.truth)
    written.optimizer.state().names()
    # The rank's own model gives the order of its buffers, or of its masters; nothing had to be searched for.
    assert written.optimizer.state().order_sources() == [
        f"the order of the stored {'masters' if is_plain(source) else 'model'}"
    ]
    mcore_ckpt_ext.convert(tmp_path / "legacy", tmp_path / "back", mcore_ckpt_ext.TorchDist())
    assert_equal(tmp_path / "back", source.truth)


@pytest.mark.thorough
def test_canonical_is_model_space_in_safetensors(checkpoint_fixture: Fixture, tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(checkpoint_fixture.run, tmp_path / "canonical", mcore_ckpt_ext.Canonical())
    plain = {}
    for file in (tmp_path / "canonical").glob("*.safetensors"):
        plain |= load_file(file)  # the library's own reader
    assert plain.keys() >= checkpoint_fixture.truth.keys()
    assert all(torch.equal(plain[key], value) for key, value in checkpoint_fixture.truth.items())
    mcore_ckpt_ext.convert(tmp_path / "canonical", tmp_path / "back", mcore_ckpt_ext.TorchDist())
    assert_equal(tmp_path / "back", checkpoint_fixture.truth)
    source, back = (mcore_ckpt_ext.open_checkpoint(path) for path in (checkpoint_fixture.run, tmp_path / "back"))
    assert back.job.common()["opt_param_scheduler"] == source.job.common()["opt_param_scheduler"]
    decays = ({group["weight_decay"] for group in checkpoint.optimizer.param_groups()} for checkpoint in (source, back))
    assert next(decays) == next(decays)


def test_a_conversion_is_repeatable(tmp_path: Path) -> None:
    """Equal input gives equal files, so that copies can be compared by their checksums."""
    for name in ("first", "second"):
        mcore_ckpt_ext.convert(
            fixture_named("p02").run, tmp_path / name, mcore_ckpt_ext.TorchDist(), workers=1 + len(name)
        )
    files = sorted(path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*") if path.is_file())
    assert len(files) == 5
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file


def test_small_blocks_give_the_same_bytes(tmp_path: Path) -> None:
    """Records are cut into many blocks: a memory limit changes nothing but the memory."""
    for name, limit in (("large", 1 << 30), ("small", 1)):
        mcore_ckpt_ext.convert(
            fixture_named("p09").run,
            tmp_path / name,
            mcore_ckpt_ext.Legacy(tensor_model_parallel_size=2),
            memory_limit=limit,
        )
    for path in (tmp_path / "large").rglob("*.pt"):
        assert path.read_bytes() == (tmp_path / "small" / path.relative_to(tmp_path / "large")).read_bytes()


def test_torch_reads_what_was_written(tmp_path: Path) -> None:
    """The archives hold for torch's own reader, checksums included."""
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "out", mcore_ckpt_ext.Legacy())
    checkpoint = mcore_ckpt_ext.open_checkpoint(tmp_path / "out")
    for file, offset, length in checkpoint.files.archives():
        mcore_ckpt_ext.storage.torch_archive.TorchArchive(  # type: ignore[attr-defined]
            checkpoint.files.reader, file, offset, length
        ).verify_checksums()
    for path in (tmp_path / "out").rglob("distrib_optim.pt"):
        state = torch.load(path, weights_only=True)
        assert state["buckets_coalesced"] is True
        assert (
            state[0][torch.bfloat16, torch.float32]["param"].numel()
            == state[0][torch.bfloat16, torch.float32]["numel_unpadded"]
        )


class TestRefusals:
    def test_lost_elements(self, corrupted_fixture: Fixture, tmp_path: Path) -> None:
        with pytest.raises(ProofError, match="written damaged.*--accept-lost"):
            mcore_ckpt_ext.convert(corrupted_fixture.run, tmp_path / "out", mcore_ckpt_ext.TorchDist())
        assert not list(tmp_path.iterdir())

    def test_lost_elements_accepted(self, corrupted_fixture: Fixture, tmp_path: Path) -> None:
        """Masters come from the weights, moments become zero; everything else is the truth."""
        report = mcore_ckpt_ext.convert(
            corrupted_fixture.run, tmp_path / "out", mcore_ckpt_ext.TorchDist(), accept_lost=True
        )
        found = everything_in(mcore_ckpt_ext.open_checkpoint(tmp_path / "out"))
        differing = {}
        for key, expected in corrupted_fixture.truth.items():
            wrong = int((found[key] != expected).sum())
            if wrong:
                differing[key] = wrong
        assert differing
        assert {key.partition(".")[2] for key in differing} <= set(report.lost)
        for key, wrong in differing.items():
            assert wrong <= report.lost[key.partition(".")[2]], key

    @pytest.mark.thorough
    @pytest.mark.parametrize("worth", [1, Checksums.WORTH])
    @pytest.mark.parametrize("name", ["p02", "p04", "p08"])
    def test_a_flipped_bit_of_a_moment(
        self, name: str, worth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only its checksum shows it, and what is written has checksums of its own."""
        monkeypatch.setattr(Checksums, "WORTH", worth)
        damaged = fixture_named(name).copy_to(tmp_path / name)
        checkpoint = mcore_ckpt_ext.open_checkpoint(damaged.run)
        file, position = payload_position(checkpoint, "exp_avg", MATRIX, 17)
        file.chmod(0o644)
        flip(file, position)
        for target in (mcore_ckpt_ext.TorchDist(), mcore_ckpt_ext.Legacy(), mcore_ckpt_ext.Canonical()):
            with pytest.raises(UnreadableCheckpointError, match="is damaged: its checksum differs"):
                mcore_ckpt_ext.convert(damaged.run, tmp_path / target.name, target)
            assert not (tmp_path / target.name).exists()
        mcore_ckpt_ext.convert(damaged.run, tmp_path / "out", mcore_ckpt_ext.TorchDist(), drop=["optimizer"])

    @pytest.mark.parametrize("name", ["p02", "p08"])
    def test_a_flipped_bit_of_a_random_state(self, name: str, tmp_path: Path) -> None:
        """A tensor among pickled objects, which no plan reads."""
        damaged = fixture_named(name).copy_to(tmp_path / name)
        (states, *_) = mcore_ckpt_ext.open_checkpoint(damaged.run).states.random().values()
        state = (states[0] if isinstance(states, list) else states)["torch_rng_state"].numpy().tobytes()
        files = sorted(path for path in damaged.iteration.rglob("*") if path.is_file())
        file = next(path for path in files if state in path.read_bytes())
        file.chmod(0o644)
        flip(file, file.read_bytes().index(state) + 300, bit=1)
        with pytest.raises(UnreadableCheckpointError, match="is damaged: its checksum differs"):
            mcore_ckpt_ext.convert(damaged.run, tmp_path / "out", mcore_ckpt_ext.TorchDist())
        assert not (tmp_path / "out").exists()

    def test_a_master_that_does_not_round_to_its_weight(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As somebody wrote it, with its checksum: nothing but the proof sees it."""
        monkeypatch.setattr(TorchArchive, "verify_checksums", lambda self, only=None: None)
        damaged = fixture_named("p04").copy_to(tmp_path / "p04")
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        data = damaged.truth[f"weight.{name}"].view(torch.uint8).numpy().tobytes()
        (file, content), *_ = (
            (path, path.read_bytes()) for path in damaged.iteration.glob("*.distcp") if data in path.read_bytes()
        )
        at = content.index(data) + 2 * 100
        file.chmod(0o644)
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ProofError, match=f"does not round.*element 100 of .*{name}"):
            mcore_ckpt_ext.convert(damaged.run, tmp_path / "out", mcore_ckpt_ext.Legacy())
        assert not (tmp_path / "out").exists()

    def test_an_existing_destination(self, tmp_path: Path) -> None:
        source = fixture_named("p02").run
        mcore_ckpt_ext.convert(source, tmp_path / "out", mcore_ckpt_ext.TorchDist())
        before = (tmp_path / "out" / "iter_0000004" / ".metadata").read_bytes()
        with pytest.raises(DestinationError, match="exists already.*--force"):
            mcore_ckpt_ext.convert(source, tmp_path / "out", mcore_ckpt_ext.TorchDist())
        assert (tmp_path / "out" / "iter_0000004" / ".metadata").read_bytes() == before
        mcore_ckpt_ext.convert(source, tmp_path / "out", mcore_ckpt_ext.Legacy(), force=True)
        assert mcore_ckpt_ext.open_checkpoint(tmp_path / "out").format.name == "torch"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_force_never_takes_other_iterations_along(self, tmp_path: Path) -> None:
        (tmp_path / "out" / "iter_0000002").mkdir(parents=True)
        with pytest.raises(DestinationError, match="other iterations"):
            mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "out", mcore_ckpt_ext.TorchDist(), force=True)
        assert (tmp_path / "out" / "iter_0000002").exists()

    def test_the_source_itself(self, damaged: Fixture) -> None:
        for destination in (damaged.run, damaged.iteration, damaged.iteration / "below", damaged.folder):
            with pytest.raises(DestinationError, match="inside the source"):
                mcore_ckpt_ext.convert(damaged.run, destination, mcore_ckpt_ext.TorchDist(), force=True)

    def test_a_source_that_changes(self, damaged: Fixture, tmp_path: Path) -> None:
        def touch(done: int, total: int) -> None:
            file = damaged.iteration / "metadata.json"
            file.chmod(0o644)
            file.write_bytes(file.read_bytes() + b" ")

        with pytest.raises(UnreadableCheckpointError, match="changed while it was read"):
            mcore_ckpt_ext.convert(damaged.run, tmp_path / "out", mcore_ckpt_ext.TorchDist(), progress=touch)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            (mcore_ckpt_ext.TorchDist(megatron_version="0.7.0"), "0.8 or later"),
            (mcore_ckpt_ext.Legacy(tensor_model_parallel_size=3), "divide"),
            (mcore_ckpt_ext.Legacy(pipeline_model_parallel_size=3), "pipeline"),
        ],
    )
    def test_unsupported_targets_are_refused(self, target: Target, message: str, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=message):
            mcore_ckpt_ext.convert(fixture_named("p01").run, tmp_path / "out", target)
        assert not list(tmp_path.iterdir())

    def test_a_layer_spec_for_another_loop_that_names_its_own(self, tmp_path: Path) -> None:
        target = mcore_ckpt_ext.TorchDist(transformer_impl="local", loop="bridge")
        with pytest.raises(UsageError, match="for jobs of Megatron-LM.*--transformer-impl local, --for bridge"):
            mcore_ckpt_ext.convert(fixture_named("p21").run, tmp_path / "out", target)
        assert not list(tmp_path.iterdir())

    def test_a_family_where_none_is_needed(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="applies only if a Hugging Face folder is read or written"):
            mcore_ckpt_ext.convert(
                fixture_named("p02").run, tmp_path / "out", mcore_ckpt_ext.TorchDist(), family="llama"
            )


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (mcore_ckpt_ext.TorchDist, {"megatron_version": "new"}, "invalid version"),
        (mcore_ckpt_ext.TorchDist, {"megatron_version": "\u0660.\u0669"}, "invalid version"),
        (mcore_ckpt_ext.TorchDist, {"expert_model_parallel_size": 0}, "expert_model_parallel_size.*1 or more"),
        (mcore_ckpt_ext.Legacy, {"tensor_model_parallel_size": 0}, "tensor_model_parallel_size.*1 or more"),
        (mcore_ckpt_ext.Legacy, {"vocab_size": -1}, "vocab_size.*1 or more"),
        (mcore_ckpt_ext.Legacy, {"pipeline_model_parallel_size": True}, "1 or more"),
        (mcore_ckpt_ext.HuggingFace, {"dtype": "int8"}, "dtype.*float32, bfloat16, float16"),
        (mcore_ckpt_ext.HuggingFace, {"kind": "exp_avg"}, "weight, fp32_param"),
        (mcore_ckpt_ext.HuggingFace, {"max_shard_size": 0}, "1 or more"),
        (mcore_ckpt_ext.Canonical, {"transformer_impl": "te"}, "transformer_engine, local"),
    ],
)
def test_a_target_is_checked_when_it_is_made(
    target: Callable[..., Target], options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        target(**options)


@pytest.mark.parametrize(
    ("target", "option"),
    [
        (mcore_ckpt_ext.Canonical, "dtype"),
        (mcore_ckpt_ext.TorchDist, "pickled"),
        (mcore_ckpt_ext.TorchDist, "tensor_model_parallel_size"),
        (mcore_ckpt_ext.HuggingFace, "megatron_version"),
    ],
)
def test_a_target_has_no_options_of_others(target: Callable[..., Target], option: str) -> None:
    with pytest.raises(TypeError, match=option):
        target(**{option: None})


def test_a_dry_run_writes_nothing_and_counts_exactly(tmp_path: Path) -> None:
    source = fixture_named("p03").run
    planned = mcore_ckpt_ext.convert(source, tmp_path / "out", mcore_ckpt_ext.Legacy(), dry_run=True)
    assert not list(tmp_path.iterdir())
    done = mcore_ckpt_ext.convert(source, tmp_path / "out", mcore_ckpt_ext.Legacy())
    assert (planned.bytes_written, planned.files, planned.records) == (done.bytes_written, done.files, done.records)


def test_the_states_of_a_data_loader_are_named(tmp_path: Path) -> None:
    """They lie in a folder of their own, which a job that resumes the result has to be given again."""
    source = fixture_named("p02").copy_to(tmp_path / "p02")
    common = torch.load(source.iteration / "common.pt", weights_only=False)
    common["args"].dataloader_type, common["args"].dataloader_save = "external", "/data/loader"
    torch.save(common, source.iteration / "common.pt")
    report = mcore_ckpt_ext.convert(source.run, tmp_path / "out", mcore_ckpt_ext.TorchDist(), dry_run=True)
    (note,) = (note for note in report.notes if "data loader" in note)
    assert note.endswith("resume with --dataloader-save /data/loader")
    assert not any(
        "data loader" in note
        for note in mcore_ckpt_ext.convert(source.run, tmp_path / "hf", mcore_ckpt_ext.HuggingFace()).notes
    )
