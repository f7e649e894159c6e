"""Test against the genuine data sets when another number of samples keeps the order."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list

from mcore_ckpt_ext.continuity.data_files import RECORD, DataFiles
from mcore_ckpt_ext.continuity.data_order import data_order
from mcore_ckpt_ext.continuity.order_change import CHANGES, SAME_ORDER, UNKNOWN
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.data_index import record_data_files, tokens_of

_LENGTH = 8


class _Tokenizer:
    vocab_size = 1000
    eod = 0
    unique_identifiers: dict[str, Any] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets of some 50 and 70 samples; no sample is twice."""
    folder = tmp_path_factory.mktemp("data")
    draws = numpy.random.RandomState(5)
    for name, documents in (("a", 20), ("b", 28)):
        builder = IndexedDatasetBuilder(f"{folder / name}.bin", dtype=numpy.int32)
        for _ in range(documents):
            tokens = torch.from_numpy(draws.randint(1, 1000, draws.randint(10, 31)))
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(f"{folder / name}.idx")
    return folder


def _job(blend: list[str], split: str, samples: int, **more: Any) -> JobArguments:
    return JobArguments.of(
        {"dataloader_type": "single", "data_parallel_size": 1, "micro_batch_size": 1, "global_batch_size": 1,
         "train_iters": samples, "train_samples": None, "consumed_train_samples": 5, "seed": 7, "split": split,
         "seq_length": _LENGTH, "data_path": blend, "mid_level_dataset_surplus": 0.005, **more}
    )  # fmt: skip


def _read(blend: list[str], split: str, samples: int) -> list[list[int]]:
    """The samples of training by the genuine builder."""
    config = GPTDatasetConfig(
        random_seed=7, sequence_length=_LENGTH, blend=get_blend_from_list(blend), split=split, tokenizer=_Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    train, *_ = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 1, 1], lambda: True, config).build()
    return [train[number]["tokens"].tolist() for number in range(min(samples, len(train)))]


@pytest.mark.parametrize(
    ("blend", "split", "sizes"),
    [
        (["a"], "100,0,0", (20, 48, 60, 85, 95, 110, 128, 140, 150)),
        (["a"], "60,40,0", (20, 30, 45, 60, 75, 90)),
        (["0.3", "a", "0.7", "b"], "100,0,0", (40, 60, 95, 130, 150, 160)),
        (["a", "b"], "100,0,0", (20, 60, 100)),
    ],
)
def test_the_verdict_is_what_the_genuine_data_sets_read(
    folder: Path, blend: list[str], split: str, sizes: tuple[int, ...]
) -> None:
    paths = [str(folder / word) if word.isalpha() else word for word in blend]
    read = {samples: _read(paths, split, samples) for samples in sizes}
    verdicts = set()
    for few, many in combinations(sizes, 2):
        jobs = [_job(paths, split, samples) for samples in (few, many)]
        is_same = read[many][: len(read[few])] == read[few]
        for written, running in (jobs, jobs[::-1]):
            order = data_order(written, running, tokens=tokens_of)
            assert order.verdict == (SAME_ORDER if is_same else CHANGES), (few, many, order.sentence)
            assert order.is_remarkable is not is_same
        verdicts.add(order.verdict)
    assert verdicts == ({SAME_ORDER} if len(paths) == 2 else {SAME_ORDER, CHANGES})


def test_what_changes_is_named(folder: Path) -> None:
    path = str(folder / "a")
    written, running = (_job([path], "100,0,0", samples) for samples in (40, 60))
    text = f"(the data set is built for 60 samples, before for 40: the documents of {path} are shuffled over 2 passes, "
    assert f"{text}the last one apart, before over 1 pass)" in data_order(written, running, tokens=tokens_of).sentence


def test_where_the_tokens_are_not_known_the_order_is_unknown(folder: Path, tmp_path: Path) -> None:
    index = (folder / "a.idx").read_bytes()
    (tmp_path / "truncated.idx").write_bytes(index[:60])
    (tmp_path / "short.idx").write_bytes(index[:20])
    (tmp_path / "sentences.idx").write_bytes(index[:26] + (5).to_bytes(8, "little") + index[34:])
    for name in ("truncated", "short", "sentences", "absent"):
        path = str(tmp_path / name)
        assert tokens_of(path, 1.0) is None
        order = data_order(_job([path], "100,0,0", 40), _job([path], "100,0,0", 60), tokens=tokens_of)
        assert (order.verdict, "the last one apart in both or in neither" in order.sentence) == (UNKNOWN, True)


def test_data_sets_of_other_models_are_shuffled_by_other_rules(folder: Path) -> None:
    jobs = [_job([str(folder / "a")], "100,0,0", samples, decoder_seq_length=_LENGTH) for samples in (40, 60)]
    assert data_order(*jobs, tokens=tokens_of).verdict == UNKNOWN


def _recorded(**arguments: Any) -> DataFiles:
    namespace = SimpleNamespace(**{"rank": 0, **arguments})
    record_data_files(namespace)
    return DataFiles.of(JobArguments.of(vars(namespace)))


def test_what_the_files_contain_is_recorded(folder: Path, tmp_path: Path) -> None:
    a, b, blend, splits = (str(path) for path in (folder / "a", folder / "b", tmp_path / "blend", tmp_path / "splits"))
    sizes = tuple(sum(Path(path + ending).stat().st_size for ending in (".bin", ".idx")) for path in (a, b))
    words = ("0.3", a, "0.7", b)
    Path(blend).write_text(f"0.3 {a}\n0.7 {b}\n")
    Path(splits).write_text(json.dumps({"train": list(words), "valid": [a], "test": [a]}))
    assert _recorded(data_path=list(words)) == DataFiles((), sizes)
    assert _recorded(train_data_path=[a]) == DataFiles((), sizes[:1])
    assert _recorded(data_args_path=blend) == DataFiles(words, sizes)
    assert _recorded(per_split_data_args_path=splits) == DataFiles(words, sizes)
    conversations = tmp_path / "conversations.jsonl"
    conversations.write_text("{}\n")
    assert _recorded(data_path=[str(conversations)], sft=True) == DataFiles((), (3,))


def test_what_cannot_be_read_is_not_recorded(folder: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    (tmp_path / "broken").write_text("[]")
    for arguments in (
        {},
        {"rank": 1, "data_path": [str(folder / "a")]},
        {"data_path": [str(folder / "a"), missing]},
        {"data_path": ["s3://bucket/a"]},
        {"data_args_path": missing},
        {"data_args_path": "s3://bucket/blend"},
        {"per_split_data_args_path": str(tmp_path / "broken")},
    ):
        namespace = SimpleNamespace(**{"rank": 0, **arguments})
        record_data_files(namespace)
        assert not hasattr(namespace, RECORD), arguments
