"""Test how saved states of Energon's data loader are found, checked without executing anything, and redistributed."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt_ext.continuity.data_order import data_order
from mcore_ckpt_ext.continuity.order_change import CHANGES, EACH_ONCE, SAME_ORDER
from mcore_ckpt_ext.errors import UnsafePickleError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.energon_states import (
    add_loader_states,
    provide_states,
    redistribute,
    restore_argument,
)
from tests.harness.packages import energon

_FOLDER = "iter_0000004"


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module with Energon's classes of states."""
    monkeypatch.syspath_prepend(str(energon()))
    return importlib.import_module("megatron.energon.savable_loader")


def _state(loader: Any, rank: int, workers: int = 2, **more: Any) -> Any:
    numbers = range(rank * workers, (rank + 1) * workers)
    states = [loader.SavableDatasetCheckpoint(state=None, offset=number) for number in numbers]
    return loader.SavableDataLoaderState(
        **{"worker_states": states, "next_worker_id": 1, "micro_batch_size": 2, **more}
    )


def _write(place: Path, states: list[Any], rank_folder: str = "mp_rank_00") -> None:
    folder = place / _FOLDER / rank_folder
    folder.mkdir(parents=True)
    for rank, state in enumerate(states):
        torch.save({"dataloader_state_dict": state}, folder / f"train_dataloader_dprank{rank:03d}.pt")


def _account(place: Path, saved: int, running: int, workers: int = 2, **more: Any) -> Any:
    shared = {"dataloader_type": "external", "dataloader_save": str(place), "micro_batch_size": 2}
    written = JobArguments.of(
        {"consumed_train_samples": 64, **shared, "data_parallel_size": saved, "num_workers": workers, **more}
    )
    job = written.replace(data_parallel_size=running, num_workers=saved * workers // running)
    return add_loader_states(data_order(written, job), written, job, _FOLDER)


def _offsets(state: Any) -> list[int]:
    return [worker.offset for worker in state.worker_states]


@pytest.mark.parametrize(("saved", "running"), [(4, 2), (2, 4), (1, 2), (4, 1)])
def test_workers_go_to_other_ranks_in_their_order(loader: Any, tmp_path: Path, saved: int, running: int) -> None:
    _write(tmp_path, [_state(loader, rank) for rank in range(saved)])
    order, states = _account(tmp_path, saved, running)
    assert (order.verdict, len(states.files)) == (EACH_ONCE, saved)
    # One rank of the new layout, which asks for its state as a job with stages does.
    arguments = SimpleNamespace(dataloader_save=str(tmp_path))

    def name(place: str, iteration: int, *, basename: str, **_: Any) -> str:
        return f"{place}/iter_{iteration:07d}/mp_rank_00_000/{basename}"

    for rank in range(running):
        ranks = SimpleNamespace(
            get_data_parallel_world_size=lambda: running, get_data_parallel_rank=lambda rank=rank: rank
        )
        provide_states({"mpu": ranks, "get_checkpoint_name": name}, arguments, states)
        read = name(arguments.dataloader_save, 4, basename=f"train_dataloader_dprank{rank:03d}.pt")
        state = torch.load(read, weights_only=False)["dataloader_state_dict"]
        each = 2 * saved // running
        assert _offsets(state) == list(range(rank * each, (rank + 1) * each))
        assert (state.next_worker_id, state.micro_batch_size) == (0, 2)
    assert arguments.dataloader_save == str(tmp_path / f"energon_dp{running}")
    restore_argument(arguments)
    assert vars(arguments) == {"dataloader_save": str(tmp_path)}


def test_another_folder_alone_keeps_every_byte(loader: Any, tmp_path: Path) -> None:
    _write(tmp_path, [_state(loader, 0), _state(loader, 1)], "mp_rank_00_000")
    order, states = _account(tmp_path, 2, 2, pipeline_model_parallel_size=4)
    assert order.verdict == SAME_ORDER
    arguments = SimpleNamespace(dataloader_save=str(tmp_path))
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: 2, get_data_parallel_rank=lambda: 1)

    def name(place: str, iteration: int, *, basename: str, **_: Any) -> str:
        return f"{place}/iter_{iteration:07d}/mp_rank_00/{basename}"

    provide_states({"mpu": ranks, "get_checkpoint_name": name}, arguments, states)
    written = tmp_path / "energon_dp2" / _FOLDER / "mp_rank_00" / "train_dataloader_dprank001.pt"
    assert written.read_bytes() == states.files[1].read_bytes()


def test_states_that_lie_where_the_script_reads_are_left_alone(loader: Any, tmp_path: Path) -> None:
    _write(tmp_path, [_state(loader, 0)])
    _, states = _account(tmp_path, 1, 1)
    arguments = SimpleNamespace(dataloader_save=str(tmp_path))
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: 1, get_data_parallel_rank=lambda: 0)
    provide_states({"mpu": ranks, "get_checkpoint_name": lambda *_, **__: str(states.files[0])}, arguments, states)
    assert vars(arguments) == {"dataloader_save": str(tmp_path)}
    assert [path.name for path in tmp_path.iterdir()] == [_FOLDER]


def test_missing_and_other_files_are_said(loader: Any, tmp_path: Path) -> None:
    def reason(place: Path, saved: int, running: int, workers: int = 2) -> str:
        order, states = _account(place, saved, running, workers)
        assert (order.verdict, order.goes_on, order.is_remarkable, states) == (CHANGES, False, True, None)
        return str(order.sentence)

    none = reason(tmp_path / "none", 4, 2)
    assert "has 0 of them, the job of the checkpoint had 4 data-parallel ranks" in none
    assert none.endswith("; 64 samples will be read again, 0 never")
    _write(tmp_path / "few", [_state(loader, 0)])
    few = reason(tmp_path / "few", 2, 2)
    assert "has 1 of them" in few
    assert few.endswith("is not known: some ranks may go on, others not")
    _write(tmp_path / "workers", [_state(loader, 0, 3), _state(loader, 1, 3)])
    assert "those of [3] workers, not of 2" in reason(tmp_path / "workers", 2, 1)
    _write(tmp_path / "nothing", [None, None])
    assert "is no state of Energon's data loader" in reason(tmp_path / "nothing", 2, 1)
    _write(tmp_path / "path", [_state(loader, 0), Path("a")])
    assert "contains pathlib" in reason(tmp_path / "path", 2, 1)


class _Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_a_pickle_that_executes_something_is_refused(
    loader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, [_state(loader, 0, micro_batch_size=_Attack()), _state(loader, 1)])
    with pytest.raises(UnsafePickleError, match="a function that no checkpoint needs"):
        _account(tmp_path, 2, 1)
    assert not Path("executed").exists()


def test_the_class_of_another_library_is_not_imported(loader: Any, tmp_path: Path) -> None:
    _write(tmp_path, [_state(loader, 0, micro_batch_size=torch.nn.Identity), _state(loader, 1)])
    order, states = _account(tmp_path, 2, 1)
    assert states is None
    assert "torch.nn.modules.linear.Identity" in order.sentence


def test_redistributed_states_keep_what_a_later_release_adds(loader: Any) -> None:
    states = [_state(loader, rank) for rank in range(2)]
    assert [_offsets(state) for state in redistribute(states, 4)] == [[0], [1], [2], [3]]
    assert isinstance(redistribute(states, 1)[0], type(states[0]))
