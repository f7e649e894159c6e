"""Test wrong and hostile checkpoints in genuine Megatron-LM 0.19.2, resumed under another layout.

Each is refused with a clear error on every rank, also on ranks that would not have read the damage, and the optimizer
is unchanged. One launch loads them all, one after the other; a rank that hangs would end it at its time limit.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, FP32_PARAM, WEIGHT
from mcore_ckpt_ext.rehearsal.rehearse import rehearse
from mcore_ckpt_ext.rehearsal.target import CHANGEABLE, sizes_in
from tests.harness.cases import Case, Outcomes, load_all
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import flip, payload_position
from tests.harness.jobs import copy_of
from tests.harness.layouts import Layout
from tests.harness.unknown_keys import LOST, OTHER, add_to_torch_dist

# Row 21 of 128: only the first of two tensor-parallel ranks has it, and it is in no sample of the layout recovery.
MATRIX, ELEMENT = "decoder.layers.1.mlp.linear_fc1.weight", 700
FULL = {"MCORE_CKPT_EXT_VERIFY": "full"}
WIDER = {"hidden_size": 64, "ffn_hidden_size": 256, "kv_channels": 16}
# The model of fixture p02, as arguments.
LLAMA = {
    "swiglu": True, "ffn_hidden_size": 64, "normalization": "RMSNorm", "position_embedding_type": "rope",
    "group_query_attention": True, "num_query_groups": 2, "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 256,
}  # fmt: skip

Damage = Callable[[Path], None]


def nothing(run: Path) -> None:
    pass


def iteration(run: Path) -> Path:
    return run / "iter_0000004"


def without(name: str) -> Damage:
    return lambda run: (iteration(run) / name).unlink()


def truncated(run: Path) -> None:
    path = iteration(run) / "__4_0.distcp"
    os.truncate(path, path.stat().st_size // 2)


def a_folder_in_place_of_a_file(run: Path) -> None:
    path = iteration(run) / "__3_0.distcp"
    path.unlink()
    path.mkdir()


def flipped(kind: str, byte: int) -> Damage:
    """One bit of one byte of an element; fp32 lies with its trailing half first."""

    def damage(run: Path) -> None:
        path, position = payload_position(open_checkpoint(run), kind, MATRIX, ELEMENT)
        flip(path, position + byte)

    return damage


def metadata_of(other: str) -> Damage:
    def damage(run: Path) -> None:
        shutil.copy(fixture_named(other).iteration / ".metadata", iteration(run))

    return damage


def garbage_metadata(run: Path) -> None:
    (iteration(run) / ".metadata").write_bytes(b"\x80\x04garbage" * 50)


def with_overlapping_chunks(run: Path) -> None:
    """Of masters: elements that two records hold."""
    path = iteration(run) / ".metadata"
    index = pickle.loads(path.read_bytes())
    key = next(key for key in index.state_dict_metadata if key.endswith((".param", "fp32_param." + MATRIX)))
    first, place = next((place, info) for place, info in index.storage_data.items() if place.fqn == key)
    chunks = index.state_dict_metadata[key].chunks
    whole = next(chunk for chunk in chunks if chunk.offsets == first.offset)
    *leading, last = whole.sizes
    offset = torch.Size((*first.offset[:-1], first.offset[-1] + 1))
    chunks.append(ChunkStorageMetadata(offset, torch.Size((*leading, last - 1))))
    index.storage_data[MetadataIndex(key, offset)] = place
    path.write_bytes(pickle.dumps(index))


def pruned(run: Path) -> None:
    """Weights edited after the save: a matrix set to zero."""
    checkpoint = open_checkpoint(run)
    rows, columns = checkpoint.tensor(WEIGHT, MATRIX).logical.shape
    path, position = payload_position(checkpoint, WEIGHT, MATRIX, 0)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes(2 * rows * columns))


def tracker_of_a_missing_iteration(run: Path) -> None:
    (run / "latest_checkpointed_iteration.txt").write_text("40")


@dataclass(frozen=True)
class Refusal:
    """A damage, the environment, model and other arguments to resume with, and what the error must say."""

    name: str
    says: str
    damage: Damage = nothing
    environment: dict[str, str] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    fixture: str = "p10"

    def __str__(self) -> str:
        return self.name


def without_common(*path: str) -> Damage:
    """Without an entry of the common state, in a file of its own as before 0.14."""

    def damage(run: Path) -> None:
        file = iteration(run) / "common.pt"
        state = torch.load(file, weights_only=False)
        *outer, name = path
        inner = state
        for key in outer:
            inner = inner[key]
        del inner[name]
        torch.save(state, file)

    return damage


REFUSALS = [
    *(
        Refusal(
            f"no {path[-1]}",
            rf"no {re.escape('.'.join(path))} in its common state",
            without_common(*path),
            fixture="p01",
        )
        for path in [
            ("opt_param_scheduler",),
            ("opt_param_scheduler", "num_steps"),
            ("opt_param_scheduler", "max_lr"),
            ("iteration",),
            ("checkpoint_version",),
        ]
    ),
    Refusal("a missing file", r"cannot be opened.*__2_0\.distcp.*use another iteration", without("__2_0.distcp")),
    Refusal("a truncated file", r"shorter than its metadata says.*__4_0\.distcp", truncated),
    Refusal("a folder in place of a file", r"not a regular file.*__3_0\.distcp", a_folder_in_place_of_a_file),
    Refusal("a weight's byte", rf"does not round to its weight.*{MATRIX}, element {ELEMENT}", flipped(WEIGHT, 0)),
    Refusal("a master's first byte", rf"does not round to its weight.*{MATRIX}", flipped(FP32_PARAM, 3)),
    Refusal("a master's second byte", rf"does not round to its weight.*{MATRIX}", flipped(FP32_PARAM, 2)),
    Refusal("a master's last byte, full verification", "checksum differs", flipped(FP32_PARAM, 0), FULL),
    Refusal("a moment's byte, full verification", "checksum differs", flipped(EXP_AVG, 1), FULL),
    Refusal("a second moment's byte, full verification", "checksum differs", flipped(EXP_AVG_SQ, 3), FULL),
    Refusal("the metadata of another version", "has no common state", metadata_of("p02")),
    Refusal("the metadata of another model", r"metadata belongs to other files.*\.distcp", metadata_of("p21")),
    Refusal("garbage as metadata", r"a pickle is damaged.*\.metadata", garbage_metadata),
    Refusal("masters that are there twice", r"more than once.*overlapping chunks", with_overlapping_chunks),
    Refusal("edited weights", f"could be verified.*{MATRIX}.*weight 0.0", pruned),
    Refusal("no metadata.json", r"not a finished torch_dist checkpoint.*metadata\.json", without("metadata.json")),
    Refusal("no .metadata", r"index cannot be read.*\.metadata.*use another iteration", without(".metadata")),
    Refusal(
        "a tracker that names no folder", r"40 is not complete.*iter_0000040.*step 4", tracker_of_a_missing_iteration
    ),
    Refusal("a wider model", r"different shapes in the model.*\(32,\) in the checkpoint.*\(64,\)", model=WIDER),
    Refusal(
        "a layer too many in the model",
        r"the checkpoint lacks.*decoder\.layers\.4\..*different: num_layers 4, now 5",
        model={"num_layers": 5},
    ),
    Refusal("a layer too many in the checkpoint", r"does not have.*decoder\.layers\.3\.", model={"num_layers": 3}),
    Refusal("a bias that the checkpoint lacks", r"the checkpoint lacks.*\.bias", model=LLAMA, fixture="p02"),
    Refusal("a vocabulary too small", r"vocabulary is smaller.*at most 96", model={"padded_vocab_size": 96}),
    Refusal(
        "another precision",
        r"another precision.*found: bfloat16; expected: float16.*--bf16.*--no-load-optim",
        model={"bf16": False, "fp16": True},
    ),
    Refusal(
        "a learning rate of embeddings that is new",
        r"no single counterpart.*max_lr 0\.0005",
        model={"decoupled_lr": 5e-4},
    ),
    Refusal(
        "biases that the model lacks",
        r"does not have.*\.bias.*different: add_bias_linear True, now False",
        model={"add_bias_linear": False},
    ),
    *(
        Refusal(
            f"a strictness that returns mismatches: {kind}",
            rf"with this strictness.*found: --dist-ckpt-strictness return_{kind}; expected: .* log_{kind}",
            arguments={"dist_ckpt_strictness": f"return_{kind}"},
        )
        for kind in ("all", "unexpected")
    ),
    # A format that stock Megatron loads under any layout: it would leave the biases out, or fail on some ranks.
    Refusal(
        "biases that the model lacks, in fully_reshardable",
        r"does not have.*\.bias.*different: add_bias_linear True, now False",
        model={"add_bias_linear": False},
        fixture="p04",
    ),
    Refusal(
        "an output layer that the checkpoint lacks, in fully_reshardable",
        r"has its own output layer.*resume without --untie-embeddings-and-output-weights",
        model={"untie_embeddings_and_output_weights": True},
        fixture="p04",
    ),
]


WITH_UNKNOWN_KEYS = Refusal("keys that nobody knows", "", lambda run: add_to_torch_dist(iteration(run)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("refusals")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    """Every refusal and, at the end, the intact checkpoint, resumed as TP2 x PP1; saved as TP1 x PP4 x DP2."""
    cases = []
    accepted = [Refusal("intact", ""), Refusal("intact, full", "", environment=FULL), WITH_UNKNOWN_KEYS]
    for number, refusal in enumerate([*REFUSALS, *accepted]):
        run = copy_of(fixture_named(refusal.fixture).run, folder / f"{number}")
        refusal.damage(run)
        cases.append(Case(refusal.name, run, refusal.arguments, refusal.environment, refusal.model))
    return load_all(folder / "job", Layout(2, 1, 2), cases)


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_it_is_refused_on_every_rank_and_the_optimizer_is_untouched(refusal: Refusal, outcomes: Outcomes) -> None:
    for rank in outcomes[refusal.name]:
        assert rank["error"] is not None
        assert rank["error"].startswith("ResumeRefusedError: mcore_ckpt_ext refused while ")
        assert "the optimizer is unchanged" in rank["error"]
        assert_says(rank["error"], refusal.says)
        assert rank["after"] == rank["before"]
        assert rank["lines"] == []


@pytest.mark.parametrize(
    "refusal", [one for one in REFUSALS if one.model.keys() <= CHANGEABLE and not one.arguments], ids=str
)
def test_a_rehearsal_is_refused_in_the_same_words(
    refusal: Refusal, outcomes: Outcomes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in refusal.environment.items():
        monkeypatch.setenv(name, value)
    run = folder / f"{REFUSALS.index(refusal)}"
    found = rehearse(run, 2, sizes_in("tp=2"), full=True, changes=refusal.model)
    assert not found.will_succeed
    assert f"ResumeRefusedError: {found.refusal}" == outcomes[refusal.name][0]["error"]


def test_a_rehearsal_of_the_intact_checkpoint_succeeds(outcomes: Outcomes, folder: Path) -> None:
    assert outcomes["intact"][0]["error"] is None
    assert rehearse(folder / f"{len(REFUSALS)}", 2, sizes_in("tp=2"), full=True).will_succeed


def test_the_line_of_a_resume_names_what_it_did_not_look_at(outcomes: Outcomes) -> None:
    (line,) = (line for line in outcomes[WITH_UNKNOWN_KEYS.name][0]["lines"] if "optimizer resumed from" in line)
    assert f"; not looked at: {LOST}, {OTHER}/shard_0_1" in line
    assert not any("not looked at" in line for line in outcomes["intact"][0]["lines"])


def test_a_program_that_catches_the_errors_of_stock_megatron_catches_the_refusals(outcomes: Outcomes) -> None:
    """Stock raises a RuntimeError, Megatron Core's own type, or torch's, by what is wrong."""
    for refusal in REFUSALS:
        for rank in outcomes[refusal.name]:
            assert {"RuntimeError", "CheckpointingException", "CheckpointException"} <= set(rank["types"])


def test_all_ranks_give_the_same_reasons(outcomes: Outcomes) -> None:
    for refusal in REFUSALS:
        first, second = outcomes[refusal.name]
        assert first["error"] == second["error"]


def test_a_refusal_names_the_ranks_that_saw_the_damage(outcomes: Outcomes) -> None:
    assert_says(outcomes["a weight's byte"][1]["error"], rf"\n  rank 0: ProofError: .*{MATRIX}")


@pytest.mark.parametrize("name", ["intact", "intact, full"])
def test_after_all_the_refusals_the_intact_checkpoint_still_loads(name: str, outcomes: Outcomes) -> None:
    for rank in outcomes[name]:
        assert (rank["error"], rank["iteration"]) == (None, 4)
        assert rank["after"] != rank["before"]
        assert len(rank["lines"]) == 1


def assert_says(error: str, pattern: str) -> None:
    assert re.search(pattern, error, re.DOTALL), f"{pattern!r} is not in {error!r}"
