"""Conversion of real checkpoints: every direction keeps every bit of every kind, and refuses what it cannot keep."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import CheckpointError, DestinationError, ProofError, UnreadableCheckpointError
from tests.conftest import DATA, INTACT, Fixture, fixture_named

# Of each target of `legacy`: TP, PP, virtual stages, EP; what a model cannot take is left out by hand below.
LAYOUTS = [(1, 1, None, None), (2, 2, None, None), (4, 1, None, None), (1, 2, 2, None)]
LAYOUTS += [(2, 1, None, 4), (1, 4, None, 1)]
# Each differs from its neighbours in the common state, the metadata, the optimizer, its prefixes or its shapes.
VERSIONS = ["0.19.2", "0.16.1", "0.14.0", "0.13.1", "0.8.0"]


def model_space(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = mcore_ckpt_ext.open_checkpoint(run)
    return {
        f"{kind}.{name}": checkpoint.tensor(kind, name).read()
        for kind in checkpoint.kinds()
        for name in checkpoint.names(kind)
    }


def assert_equal(run: Path, truth: dict[str, torch.Tensor]) -> None:
    """Bit for bit; a vocabulary that had to be padded further has zeros there."""
    found = model_space(run)
    assert found.keys() >= truth.keys()
    for key, expected in truth.items():
        rows = expected.shape[0] if expected.dim() else None
        assert torch.equal(found[key][:rows] if rows else found[key], expected), key
        if rows:
            assert not found[key][rows:].any(), key


@pytest.mark.parametrize("version", VERSIONS)
def test_torch_dist_for_every_version(version: str, checkpoint_fixture: Fixture, tmp_path: Path) -> None:
    report = mcore_ckpt_ext.convert(checkpoint_fixture.run, tmp_path / "out", to="torch_dist", megatron_version=version)
    assert_equal(tmp_path / "out", checkpoint_fixture.truth)
    written = mcore_ckpt_ext.open_checkpoint(tmp_path / "out")
    newer = tuple(map(int, version.split("."))) >= (0, 15)
    assert written.optimizer_format == ("fully_reshardable" if newer else "fully_sharded_model_space")
    assert (written.folder / "common.pt").exists() == (not version.startswith("0.19"))
    assert written.iteration == 4
    masters = sum(value.numel() for key, value in checkpoint_fixture.truth.items() if key.startswith("fp32_param."))
    assert report.proven_elements == masters
    assert sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file()) == report.bytes_written


def legacy_cases() -> Iterator[tuple[str, tuple[int, int, int | None, int | None]]]:
    for name, layout in itertools.product(INTACT, LAYOUTS):
        tensor, pipeline, virtual, expert = layout
        arguments = mcore_ckpt_ext.open_checkpoint(Fixture(DATA / name).run).args
        experts, layers = bool(arguments.get("num_experts")), arguments["num_layers"]
        if (expert and not experts) or layers % (pipeline * (virtual or 1)):
            continue
        yield name, layout


@pytest.mark.parametrize(("name", "layout"), list(legacy_cases()), ids=str)
def test_legacy_and_back_under_every_layout(
    name: str, layout: tuple[int, int, int | None, int | None], tmp_path: Path
) -> None:
    source = Fixture(DATA / name)
    tensor, pipeline, virtual, expert = layout
    mcore_ckpt_ext.convert(
        source.run, tmp_path / "legacy", to="legacy", megatron_version="0.16.1",
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual, expert_model_parallel_size=expert,
    )  # fmt: skip
    written = mcore_ckpt_ext.open_checkpoint(tmp_path / "legacy")
    assert (written.format, written.optimizer_format) == ("torch", "legacy_torch")
    assert (written.layout.tensor, written.layout.pipeline) == (tensor, pipeline)
    assert_equal(tmp_path / "legacy", source.truth)
    written.optimizer.names()
    # The rank's own model gives the order of its buffers; nothing had to be searched for.
    assert written.optimizer.witnesses() == ["the order of the stored model"]
    mcore_ckpt_ext.convert(tmp_path / "legacy", tmp_path / "back", to="torch_dist")
    assert_equal(tmp_path / "back", source.truth)


def test_canonical_is_model_space_in_safetensors(checkpoint_fixture: Fixture, tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(checkpoint_fixture.run, tmp_path / "canonical", to="canonical")
    plain = {}
    for file in (tmp_path / "canonical").glob("*.safetensors"):
        plain |= load_file(file)  # the library's own reader
    assert plain.keys() >= checkpoint_fixture.truth.keys()
    assert all(torch.equal(plain[key], value) for key, value in checkpoint_fixture.truth.items())
    mcore_ckpt_ext.convert(tmp_path / "canonical", tmp_path / "back", to="torch_dist")
    assert_equal(tmp_path / "back", checkpoint_fixture.truth)
    source, back = (mcore_ckpt_ext.open_checkpoint(path) for path in (checkpoint_fixture.run, tmp_path / "back"))
    assert back.common["opt_param_scheduler"] == source.common["opt_param_scheduler"]
    decays = ({group["weight_decay"] for group in checkpoint.param_groups()} for checkpoint in (source, back))
    assert next(decays) == next(decays)


def test_a_conversion_is_repeatable(tmp_path: Path) -> None:
    """Equal input gives equal files, so that copies can be compared by their checksums."""
    for name in ("first", "second"):
        mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / name, to="torch_dist", workers=1 + len(name))
    files = sorted(path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*") if path.is_file())
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file


def test_small_blocks_give_the_same_bytes(tmp_path: Path) -> None:
    """Records are cut into many blocks: a memory limit changes nothing but the memory."""
    for name, limit in (("large", 1 << 30), ("small", 1)):
        mcore_ckpt_ext.convert(
            fixture_named("p09").run, tmp_path / name, to="legacy", memory_limit=limit, tensor_model_parallel_size=2
        )
    for path in (tmp_path / "large").rglob("*.pt"):
        assert path.read_bytes() == (tmp_path / "small" / path.relative_to(tmp_path / "large")).read_bytes()


def test_torch_reads_what_was_written(tmp_path: Path) -> None:
    """The archives hold for torch's own reader, checksums included."""
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "out", to="legacy")
    checkpoint = mcore_ckpt_ext.open_checkpoint(tmp_path / "out")
    for file, offset, length in checkpoint.archives():
        mcore_ckpt_ext.storage.torch_archive.TorchArchive(checkpoint.reader, file, offset, length).verify_checksums()
    for path in (tmp_path / "out").rglob("distrib_optim.pt"):
        state = torch.load(path, weights_only=True)
        assert state["buckets_coalesced"] is True
        assert state[0][torch.bfloat16, torch.float32]["param"].numel() == state[0][torch.bfloat16, torch.float32][
            "numel_unpadded"
        ]


class TestRefusals:
    def test_lost_elements(self, corrupted_fixture: Fixture, tmp_path: Path) -> None:
        with pytest.raises(ProofError, match="written damaged.*--accept-lost"):
            mcore_ckpt_ext.convert(corrupted_fixture.run, tmp_path / "out", to="torch_dist")
        assert not list(tmp_path.iterdir())

    def test_lost_elements_accepted(self, corrupted_fixture: Fixture, tmp_path: Path) -> None:
        """Masters come from the weights, moments become zero; everything else is the truth."""
        report = mcore_ckpt_ext.convert(corrupted_fixture.run, tmp_path / "out", to="torch_dist", accept_lost=True)
        found = model_space(tmp_path / "out")
        differing = {}
        for key, expected in corrupted_fixture.truth.items():
            wrong = int((found[key] != expected).sum())
            if wrong:
                differing[key] = wrong
        assert differing
        assert {key.partition(".")[2] for key in differing} <= set(report.lost)
        for key, wrong in differing.items():
            assert wrong <= report.lost[key.partition(".")[2]], key

    def test_a_master_that_does_not_round_to_its_weight(self, tmp_path: Path) -> None:
        """Of a format that shows every parameter's place: nothing but the proof sees the flipped bit."""
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
            mcore_ckpt_ext.convert(damaged.run, tmp_path / "out", to="legacy")
        assert not (tmp_path / "out").exists()

    def test_an_existing_destination(self, tmp_path: Path) -> None:
        source = fixture_named("p02").run
        mcore_ckpt_ext.convert(source, tmp_path / "out", to="torch_dist")
        before = (tmp_path / "out" / "iter_0000004" / ".metadata").read_bytes()
        with pytest.raises(DestinationError, match="exists already.*--force"):
            mcore_ckpt_ext.convert(source, tmp_path / "out", to="torch_dist")
        assert (tmp_path / "out" / "iter_0000004" / ".metadata").read_bytes() == before
        mcore_ckpt_ext.convert(source, tmp_path / "out", to="legacy", force=True)
        assert mcore_ckpt_ext.open_checkpoint(tmp_path / "out").format == "torch"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_force_never_takes_other_iterations_along(self, tmp_path: Path) -> None:
        (tmp_path / "out" / "iter_0000002").mkdir(parents=True)
        with pytest.raises(DestinationError, match="other iterations"):
            mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "out", to="torch_dist", force=True)
        assert (tmp_path / "out" / "iter_0000002").exists()

    def test_the_source_itself(self, damaged: Fixture) -> None:
        for destination in (damaged.run, damaged.iteration, damaged.iteration / "below", damaged.folder):
            with pytest.raises(DestinationError, match="its own source"):
                mcore_ckpt_ext.convert(damaged.run, destination, to="torch_dist", force=True)

    def test_a_source_that_changes(self, damaged: Fixture, tmp_path: Path) -> None:
        def touch(done: int, total: int) -> None:
            file = damaged.iteration / "metadata.json"
            file.chmod(0o644)
            file.write_bytes(file.read_bytes() + b" ")

        with pytest.raises(UnreadableCheckpointError, match="changed while it was read"):
            mcore_ckpt_ext.convert(damaged.run, tmp_path / "out", to="torch_dist", progress=touch)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"to": "torch_dist", "megatron_version": "0.7.0"}, "0.8 or later"),
            ({"to": "torch_dist", "megatron_version": "new"}, "no version"),
            ({"to": "legacy", "tensor_model_parallel_size": 3}, "divide"),
            ({"to": "legacy", "pipeline_model_parallel_size": 3}, "pipeline"),
            ({"to": "pickles"}, "unknown format"),
        ],
    )
    def test_what_cannot_be_written(self, options: dict[str, object], message: str, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=message):
            mcore_ckpt_ext.convert(fixture_named("p01").run, tmp_path / "out", **options)
        assert not list(tmp_path.iterdir())


def test_a_dry_run_writes_nothing_and_counts_exactly(tmp_path: Path) -> None:
    source = fixture_named("p03").run
    planned = mcore_ckpt_ext.convert(source, tmp_path / "out", to="legacy", dry_run=True)
    assert not list(tmp_path.iterdir())
    done = mcore_ckpt_ext.convert(source, tmp_path / "out", to="legacy")
    assert (planned.bytes_written, planned.files, planned.records) == (done.bytes_written, done.files, done.records)
