"""Plugin: training reads a webdataset with Energon, as the multimodal example of Megatron-LM does.

The argument, the loader, and how its state is restored are those of `examples/multimodal/multimodal_args.py` and
`dataloader_provider.py` (core_v0.16.1 to 0.19.0); only the samples are text, and every tensor-parallel rank reads. The
example's `torch.load` refuses Energon's classes since torch 2.6, so that its scripts set `weights_only` or
TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import arguments, checkpointing, get_args
from megatron_on_cpu import train_gpt

PACKAGES_VARIABLE, DATA_VARIABLE, FOLDER_VARIABLE = "TEST_ENERGON", "TEST_WEBDATASET", "TEST_SAMPLES"
LENGTH, TOKENS = 32, 100
sys.path.append(os.environ[PACKAGES_VARIABLE])
energon: Any = importlib.import_module("megatron.energon")


class EnergonDataloader:
    """A wrapper of Energon's loader with the method that Megatron calls to save its state."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def __next__(self) -> dict[str, torch.Tensor]:
        numbers = list(map(int, next(self._batches).text))
        if parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.is_pipeline_first_stage():
            path = Path(os.environ[FOLDER_VARIABLE]) / f"rank_{torch.distributed.get_rank()}.jsonl"
            with path.open("a") as file:
                file.write(f"{json.dumps(numbers)}\n")
        text = torch.stack([
            torch.randint(TOKENS, (LENGTH + 1,), generator=torch.Generator().manual_seed(number)) for number in numbers
        ])  # fmt: skip
        return {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(len(numbers), LENGTH),
            "position_ids": torch.arange(LENGTH).repeat(len(numbers), 1),
            "attention_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None],
        }

    def __iter__(self) -> EnergonDataloader:
        return self

    def save_state(self) -> Any:
        """Return the state of this rank's loader."""
        return self._loader.save_state_rank()


def build_loaders(samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the loader of this rank, and restore its state."""
    args = get_args()
    rank = parallel_state.get_data_parallel_rank()
    config = energon.WorkerConfig(
        rank=rank, world_size=parallel_state.get_data_parallel_world_size(), num_workers=args.num_workers
    )
    data = energon.get_train_dataset(
        os.environ[DATA_VARIABLE], worker_config=config, batch_size=args.micro_batch_size, shuffle_buffer_size=4,
        max_samples_per_sequence=4, task_encoder=energon.DefaultTaskEncoder(),
    )  # fmt: skip
    loader = energon.get_savable_loader(data, worker_config=config)
    if args.load is not None and getattr(args, "dataloader_save", None):
        name = checkpointing.get_checkpoint_name(
            args.dataloader_save, args.iteration, tensor_rank=0, pipeline_rank=0,
            basename=f"train_dataloader_dprank{rank:03d}.pt",
        )  # fmt: skip
        if os.path.exists(name):  # noqa: PTH110  as in the example
            try:
                state = torch.load(name, map_location="cpu", weights_only=False)
                loader.restore_state_rank(state["dataloader_state_dict"])
                print(f"restored dataset state from {name}", flush=True)
            except Exception as error:
                print("loading dataset state failed. Skipping. " + str(error), flush=True)
        else:
            print(f"dataset state {name} does not exist", flush=True)
    return EnergonDataloader(loader), None, None


def install() -> None:
    """Replace the data of the training script, and add the argument of the example."""
    original = arguments.add_megatron_arguments

    def add_megatron_arguments(parser: Any) -> Any:
        parser.add_argument("--dataloader-save", type=str, default=None)
        return original(parser)

    arguments.add_megatron_arguments = add_megatron_arguments
    build_loaders.is_distributed = True  # type: ignore[attr-defined]
    train_gpt.build_datasets = build_loaders


install()
