"""Test which checkpoints are exported to Hugging Face folders, and that no export error reaches the job."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.megatron import huggingface_export
from mcore_ckpt_ext.megatron.huggingface_export import Exports, check_export, environment_of, export_command
from mcore_ckpt_ext.megatron.saving.atomic_write import Disk
from mcore_ckpt_ext.megatron.saving.publisher import Publisher
from mcore_ckpt_ext.megatron.saving.save import Save

EVERY = Namespace(ckpt_ext_export_hf=4, save="run", save_interval=2, ckpt_format="torch_dist", load=None)


def save_of(run: Path, iteration: int, text: str = "") -> Save:
    tracker = run / "latest_checkpointed_iteration.txt"
    folder = run / f"iter_{iteration:07d}"
    return Save(iteration, folder, tracker, text or str(iteration), True, sidecar=lambda saved: "")


def test_every_such_checkpoint_and_no_other(tmp_path: Path) -> None:
    chosen = [number for number in range(1, 13) if export_command(save_of(tmp_path, number), EVERY) is not None]
    assert chosen == [4, 8, 12]
    assert export_command(save_of(tmp_path, 0, "release"), EVERY) is None
    assert export_command(save_of(tmp_path, 4), Namespace(ckpt_ext_export_hf=None)) is None
    command = export_command(save_of(tmp_path, 4), EVERY)
    assert command is not None
    assert command[-8:] == [str(tmp_path / "hf" / "iter_0000004"), "--to", "hf", "--force", "--workers", "1",
                            "--memory-limit", "256MiB"]  # fmt: skip


def test_the_tokenizer_is_that_of_the_folder_that_the_job_began_with(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    for named in ({"load": str(model)}, {"load": "run", "pretrained_checkpoint": str(model)}):
        command = export_command(save_of(tmp_path, 4), Namespace(**{**vars(EVERY), **named}))
        assert command is not None
        assert command[-2:] == ["--tokenizer", str(model)]
    command = export_command(save_of(tmp_path, 4), Namespace(**vars(EVERY), tokenizer_model=str(tmp_path)))
    assert command is not None
    assert command[-2:] == ["--tokenizer", str(tmp_path)]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"ckpt_ext_export_hf": 3}, "--save-interval 2"),
        ({"ckpt_ext_export_hf": -4}, "--ckpt-ext-export-hf -4"),
        ({"save": None}, "--save None"),
        ({"save": "s3://bucket/run"}, "--save s3://bucket/run"),
        ({"ckpt_format": "torch"}, "--ckpt-format torch"),
        ({"save_interval": None}, "--save-interval None"),
    ],
)
def test_a_job_that_could_not_write_them_does_not_begin(options: dict[str, Any], found: str) -> None:
    check_export(EVERY)
    check_export(Namespace(ckpt_ext_export_hf=None))
    with pytest.raises(UsageError, match=found):
        check_export(Namespace(**{**vars(EVERY), **options}))


def test_the_process_is_no_rank_of_the_job() -> None:
    of_job = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "here", "TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "3"}
    assert environment_of({**of_job, "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3"}) == {
        "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MCORE_CKPT_EXT": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["sh", "-c", "echo first; echo mcore-ckpt: error: no such family >&2; exit 2"], "error: no such family"),
        (["sh", "-c", "kill -9 $$"], "iteration 4"),
        (["/nowhere/python"], "No such file"),
    ],
)
def test_a_failure_is_a_loud_message_and_nothing_else(
    command: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_export, "export_command", lambda save, arguments: command)
    said: list[str] = []
    warned: list[str] = []
    Exports(lambda work: work(), said.append, warned.append).follow(save_of(tmp_path, 4), EVERY)
    assert said == []
    (line,) = warned
    assert line.startswith("WARNING: no Hugging Face folder of iteration 4 was written to")
    assert "the checkpoint itself is complete" in line
    assert told in line


def test_a_callback_cannot_fail_its_save(tmp_path: Path) -> None:
    said: list[str] = []
    warned: list[str] = []

    def follow(save: Save) -> None:
        raise RuntimeError("no thread to be had")

    publisher = Publisher(Disk(), lambda work: work(), lambda: 0.0, said.append, warned.append, follow)  # type: ignore[arg-type,return-value]
    save = save_of(tmp_path, 4)
    save.line = "iteration 4 is complete"
    publisher.announce(save)
    assert said == ["iteration 4 is complete"]
    assert warned == ["iteration 4 is saved, but then: RuntimeError: no thread to be had"]
