"""ms-swift's genuine `save_mcore_checkpoint` and `load_mcore_checkpoint` around a tiny GPT on CPU ranks.

argv: the folder that ms-swift is installed in, tensor and pipeline parallel size, the run folder to load or "none",
the run folder to save or "none". What these two functions use of the rest of ms-swift and of mcore-bridge is stood in
for: the unwrapping of a model, a logger, and which rank is the first.
"""

import importlib
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import core_model
import torch

packages, tensor, pipeline, source, target = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6]


def module(name: str, path: str = "", **content: Any) -> None:
    made = ModuleType(name)
    made.__path__ = [path] if path else []
    vars(made).update(content)
    sys.modules[name] = made


if "swift" not in sys.modules:
    for name in ("swift", "swift.megatron", "swift.megatron.utils"):
        module(name, f"{packages}/{name.replace('.', '/')}")
    module("swift.utils", check_json_format=dict, get_logger=logging.getLogger, init_process_group=None,
           set_device=None, is_master=lambda: torch.distributed.get_rank() == 0)  # fmt: skip
    module("mcore_bridge", set_random_seed=None, split_cp_inputs=None,
           unwrap_model=lambda chunks: core_model.Job(chunks, None, {}).models)  # fmt: skip
checkpoints: Any = importlib.import_module("swift.megatron.utils.megatron_lm_utils")

layout = core_model.Layout(tensor=tensor, pipeline=pipeline)
core_model.start(layout)
job = core_model.build(layout, experts=False, tied=False)
wrapped, optimizer = job.chunks[0], job.optimizer
stated = {name: value for name, value in job.arguments.items() if name != "dist_ckpt_strictness"}
args = SimpleNamespace(
    **stated, output_dir=target, mcore_model=source, no_save_optim=False, no_save_rng=True, no_load_optim=False,
    no_load_rng=True, finetune=False, tuner_type="full", async_save=False, dist_ckpt_save_pre_mcore_014=False,
    dist_ckpt_optim_fully_reshardable=False, data_parallel_random_init=False,
)  # fmt: skip
if source != "none" and checkpoints.load_mcore_checkpoint(args, [wrapped], optimizer) != 4:
    raise RuntimeError("resumed from another iteration")
if target != "none":
    train(wrapped, optimizer)  # type: ignore[name-defined]  # noqa: F821 - made by whoever runs this
    checkpoints.save_mcore_checkpoint(args, [wrapped], optimizer, iteration=4)
