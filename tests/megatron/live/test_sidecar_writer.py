"""Test that no sidecar is written if a rank fails to contribute, and that the log names the rank and the reason."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.megatron.live import sidecar_writer
from mcore_ckpt_ext.megatron.live.sidecar_writer import PackingRecorder


class Optimizer:
    """One that no part of this package knows."""


def test_a_rank_that_cannot_tell_its_packing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded_groups(chunks: object, optimizer: object) -> list[object]:
        raise ValueError("a buffer of another kind")

    monkeypatch.setattr(sidecar_writer, "recorded_groups", recorded_groups)
    said: list[str] = []
    recorder, optimizer = PackingRecorder(said.append, ("0.2.0", "0.19.2")), Optimizer()
    for _ in range(2):  # it is gathered once, and told once
        assert recorder.text(list, optimizer, {}, 4) == ""
    told = [line for line in said if "no sidecar" in line]
    why = "rank 0: ValueError: a buffer of another kind"
    assert told == [f"no sidecar for this job: {why}; a resume will recover the packing instead"]


def test_the_packing_of_some_ranks_is_not_taken_for_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_writer, "recorded_groups", lambda chunks, optimizer: ["group"])
    monkeypatch.setattr(sidecar_writer, "gather", lambda own: [own, ([], "OSError: no")])
    said: list[str] = []
    recorder = PackingRecorder(said.append, ("0.2.0", "0.19.2"))
    assert recorder.text(list, Optimizer(), {}, 4) == ""
    assert said[0].startswith("no sidecar for this job: rank 1: OSError: no")
