"""What ranks agree on before they have process groups, by a genuine store of torch, which may be of earlier starts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from mcore_ckpt_ext.errors import ResumeRefusedError
from mcore_ckpt_ext.megatron.elastic.agreement import Agreement
from mcore_ckpt_ext.megatron.elastic.ending import ERROR_FILE, OTHERS_LEAVE, Ending, record
from mcore_ckpt_ext.megatron.elastic.hazards import hazards

RANKS, PATIENCE = 5, 30.0


@pytest.fixture
def stores() -> Callable[[], TCPStore]:
    """Connections to one store."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect() -> TCPStore:
        return TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=PATIENCE))

    return connect


def on_ranks(stores: Callable[[], TCPStore], work: Callable[[Agreement, int], object]) -> list[object]:
    """The result of each rank."""
    results: list[object] = [None] * RANKS

    def run(rank: int) -> None:
        results[rank] = work(Agreement(stores(), rank, RANKS, PATIENCE), rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_take_what_the_first_one_decides(stores: Callable[[], TCPStore]) -> None:
    assert on_ranks(stores, lambda agreement, rank: agreement.share(lambda: f"by {rank}")) == ["by 0"] * RANKS


def test_no_rank_takes_what_an_earlier_start_decided(stores: Callable[[], TCPStore]) -> None:
    """The agents' store is the same in every start, and ranks of the last one may have died anywhere."""
    store = stores()
    for rank in range(1, RANKS):
        store.set(f"mcore_ckpt_ext/elastic/asked/{rank}", "of a rank that is dead")
    for start in range(3):
        value = f"start {start}"
        found = on_ranks(stores, lambda agreement, _, value=value: agreement.share(lambda: value))  # type: ignore[misc]
        assert found == [value] * RANKS


def test_ranks_that_are_missing_are_a_reason_to_refuse(stores: Callable[[], TCPStore]) -> None:
    with pytest.raises(ResumeRefusedError, match="do not take part"):
        Agreement(stores(), 0, 2, 1.0).share(lambda: "alone")
    with pytest.raises(ResumeRefusedError, match="do not take part"):
        Agreement(stores(), 1, 2, 1.0).share(lambda: "never called")


@pytest.mark.parametrize("code", [0, 16])
def test_ranks_that_wait_end_with_the_exit_code_of_the_job(stores: Callable[[], TCPStore], code: int) -> None:
    def work(agreement: Agreement, rank: int) -> object:
        agreement.share(lambda: "some wait")
        return (
            agreement.wait_for_end() if rank >= 3 else agreement.announce_end(code, 2, PATIENCE) if rank == 0 else None
        )

    assert on_ranks(stores, work) == [None, None, None, code, code]


def test_a_rank_that_waits_notices_that_the_store_has_died() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agreement = Agreement(TCPStore("127.0.0.1", server.port, is_master=False), 1, 2, PATIENCE)
    del server
    assert agreement.wait_for_end() is None


@pytest.mark.parametrize(
    ("signaled", "own", "status", "code"),
    [
        (False, False, None, 0),
        (False, False, 3, 3),
        (False, False, "text", 1),
        (True, True, 0, 0),
        (True, False, 0, OTHERS_LEAVE),
        (True, False, 3, 3),
    ],
)
def test_ranks_whose_node_stays_fail_so_that_their_agent_goes_on(
    signaled: bool, own: bool, status: object, code: int
) -> None:
    ending = Ending()
    ending.handler = SimpleNamespace(_signal_received=own) if signaled else None
    assert ending.code_for(status) == code


def test_a_refusal_is_what_torchrun_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(file))
    record(ResumeRefusedError("no layout fits", hint="wait"))
    record(ValueError("what followed"))
    message = json.loads(file.read_text())["message"]
    assert "no layout fits" in message["extraInfo"]["py_callstack"]
    assert "Traceback" not in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"])


TORCHRUN = ["python", "torchrun", "--nnodes=6:8", "--rdzv-backend=c10d", "--rdzv-endpoint", "launcher:29400"]
WORKER = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_MAX_RESTARTS": "20", "TORCHELASTIC_USE_AGENT_STORE": "False"}
SAVING = {"save": "run", "load": "run/", "save_interval": 100}
HANDLED = SimpleNamespace(exit_signal_handler=True, **SAVING)


@pytest.mark.parametrize(
    ("environment", "command", "arguments", "named"),
    [
        (WORKER, [*TORCHRUN, "--rdzv-conf=is_host=0"], HANDLED, []),
        (WORKER, [*TORCHRUN, "--rdzv_conf", "is_host=0,timeout=60"], HANDLED, []),
        (WORKER, [], HANDLED, []),
        (WORKER, TORCHRUN, HANDLED, ["is_host=0"]),
        ({**WORKER, "TORCHELASTIC_MAX_RESTARTS": "0"}, [], HANDLED, ["--max-restarts 0"]),
        ({**WORKER, "TORCHELASTIC_USE_AGENT_STORE": "True"}, [], HANDLED, ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]),
        (WORKER, ["torchrun", "--nnodes", "8", "--rdzv-backend", "etcd-v2"], HANDLED, ["--nnodes 8"]),
        (WORKER, [], SimpleNamespace(**SAVING), ["--exit-signal-handler"]),
        (WORKER, [], SimpleNamespace(exit_signal_handler=True, load="run"), ["without --save"]),
        (WORKER, [], SimpleNamespace(**vars(HANDLED) | {"save_interval": None}), ["--save-interval"]),
        (WORKER, [], SimpleNamespace(**vars(HANDLED) | {"load": "other"}), ["from other"]),
        (WORKER, [], SimpleNamespace(**vars(HANDLED) | {"load": None}), ["from the beginning"]),
        ({}, [], HANDLED, ["torchrun did not start this job"]),
    ],
)
def test_what_a_job_cannot_survive_is_named(
    environment: dict[str, str], command: list[str], arguments: object, named: list[str]
) -> None:
    found = list(hazards(environment, command, arguments))
    assert len(found) == len(named)
    assert all(part in hazard for part, hazard in zip(named, found, strict=True))
