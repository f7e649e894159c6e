"""A live job of real Megatron-LM within a rank: set up once, then any number of calls of its `load_checkpoint`.

Imported by the scripts in this folder, which `megatron_on_cpu.launch` runs on every rank.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args
from megatron.training.initialize import initialize_megatron
from megatron_on_cpu.optimizer_parts import optimizers_of
from megatron_on_cpu.release_api import build_chunk, parse_arguments
from names import names_of

training: Any = importlib.import_module("megatron.training.training")
ORDER_VARIABLE, REPORT_VARIABLE = "TEST_ORDER", "TEST_REPORT"


@dataclass(frozen=True)
class Live:
    """A model, wrapped for data parallelism, and its optimizer."""

    model: list[Any]
    optimizer: Any

    @property
    def optimizers(self) -> list[Any]:
        """Megatron's optimizers, without a chain around them."""
        return optimizers_of(self.optimizer)

    def masters(self) -> Iterator[tuple[Any, dict[str, Any], torch.Tensor]]:
        """Yield every fp32 master shard, with its optimizer and its parameter group."""
        for outer in self.optimizers:
            for group in outer.optimizer.param_groups:
                for master in group["params"]:
                    yield outer.optimizer, group, master

    def elements(self) -> int:
        """Return the number of elements of the optimizer on this rank, of each kind."""
        return sum(master.numel() for _, _, master in self.masters())

    def fill_with_noise(self, seed: int) -> None:
        """Give every master and moment a distinct value, and every group a step, so that no value is right by chance.

        Optimizers that are not distributed, or have their masters elsewhere, are not changed. Copies of a parameter get
        the same values on all ranks.
        """
        names = names_of(self.model)
        for outer in self.optimizers:
            if not hasattr(outer, "gbuf_ranges") or getattr(outer.config, "use_precision_aware_optimizer", False):
                continue
            for group in outer.optimizer.param_groups:
                group["step"] = 4
            for parameter, (group, order) in outer.model_param_group_index_map.items():
                master = outer.optimizer.param_groups[group]["params"][order]
                partitioned = getattr(parameter, "tensor_model_parallel", False)
                rank = parallel_state.get_tensor_model_parallel_rank() if partitioned else 0
                generator = torch.Generator().manual_seed(zlib.crc32(f"{names[id(parameter)]} {rank} {seed}".encode()))
                start = outer._get_model_param_range_map(parameter)["param"].start
                noise = torch.randn(3, parameter.numel(), generator=generator)[:, start : start + master.numel()]
                with torch.no_grad():
                    master.copy_(0.02 * noise[0].view(master.shape))
                state = {"exp_avg": noise[1].view(master.shape), "exp_avg_sq": noise[2].abs().view(master.shape)}
                own = {kind: values.to(master.device, copy=True) for kind, values in state.items()}
                outer.optimizer.state[master].update(own)

    def fingerprint(self) -> str:
        """Return a hash of the optimizer's state: masters, moments, parameter groups, gradient scaler."""
        digest = hashlib.sha256()
        for inner, group, master in self.masters():
            settings = {name: value for name, value in group.items() if name != "params"}
            digest.update(repr(sorted(settings.items(), key=lambda item: item[0])).encode())
            for tensor in (master, *(inner.state[master][kind] for kind in sorted(inner.state[master]))):
                digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        for outer in self.optimizers:
            scaler = getattr(outer, "grad_scaler", None)
            digest.update(repr(scaler.state_dict() if scaler else None).encode())
        return digest.hexdigest()


def start() -> Any:
    """Initialize Megatron as `pretrain` does, and return its arguments."""
    parse_arguments()
    initialize_megatron()
    return get_args()


def built() -> Live:
    """Build Megatron's own model and optimizer for the current arguments, without loading."""
    with changed(vars(get_args()), {"load": None}):
        model, optimizer, _ = training.setup_model_and_optimizer(
            model_type=ModelType.encoder_or_decoder, **_how_the_model_is_built(get_args())
        )
    return Live(model, optimizer)


def _how_the_model_is_built(arguments: Any) -> dict[str, Any]:
    """Return how to build the model: by a configuration since 0.19, by a function before."""
    made_of: Any = importlib.import_module("megatron.training.argument_utils")
    if not hasattr(made_of, "gpt_config_from_args"):
        return {"model_provider_func": build_chunk}
    config_of = made_of.hybrid_config_from_args if arguments.hybrid_layer_pattern else made_of.gpt_config_from_args
    config = made_of.pretrain_cfg_container_from_args(arguments, config_of(arguments))
    return {"cfg_container": config, "pg_collection": ProcessGroupCollection.use_mpu_process_groups()}


@contextmanager
def changed(where: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Within this scope, a dictionary (arguments, the environment) has other values."""
    before = {name: where[name] for name in values if name in where}
    where.update(values)
    try:
        yield
    finally:
        for name in values:
            del where[name]
        where.update(before)


def order() -> Any:
    """Read the order that the test wrote."""
    return json.loads(Path(os.environ[ORDER_VARIABLE]).read_text())


def report(content: Any) -> None:
    """Write this rank's report for the test."""
    path = Path(os.environ[REPORT_VARIABLE]) / f"rank_{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps(content))
