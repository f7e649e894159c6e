"""``--use-precision-aware-optimizer`` on CPU ranks: a plugin of ``launch.run``, and its optimizer.

Megatron then uses the FusedAdam of Transformer Engine, which stores the masters itself. Its *state and the shapes in
it* are reproduced here, because they are stored in checkpoints. Source: Transformer Engine 2.20.2,
transformer_engine/pytorch/optimizers/fused_adam.py and transformer_engine/common/multi_tensor/adam.cu:

- the step in the parameter group; ``exp_avg``, ``exp_avg_sq`` and ``master_param`` in the state;
- the moments in fp32, bf16 or fp16, the master in fp32 or fp16; whatever is fp16 is divided by a scale of its own.
  ``get_unscaled_state`` gives all of them as fp32, ``set_scaled_state`` takes them as fp32;
- with remainders, for bf16 parameters, the master is the parameter and an int16: the trailing 16 bits of the fp32
  value.  The parameter is the master rounded *half up*; where the remainder is negative it is one too large.

Left out: fp8 moments, CUDA graphs, DTensors.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from typing import Any

import torch

from megatron_on_cpu.fused_adam import FusedAdam, advance

REMAINDERS_VARIABLE = "MEGATRON_ON_CPU_REMAINDERS"
"""Environment variable: 0 sets ``OptimizerConfig.store_param_remainders = False``, for which Megatron has no flag."""

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
_TRANSFORMER_ENGINE = "transformer_engine"
_OPTIMIZERS = f"{_TRANSFORMER_ENGINE}.pytorch.optimizers"


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split 1-D fp32 masters into bf16 parameters and int16 remainders."""
    halves = master.contiguous().view(torch.int16).view(-1, 2)
    remainder = halves[:, 0].clone()
    return (halves[:, 1] + (remainder < 0)).view(torch.bfloat16), remainder


def join(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Join a 1-D bf16 parameter and its int16 remainder to fp32 masters."""
    leading = parameter.view(torch.int16) - (remainder < 0).to(torch.int16)
    return torch.stack([remainder, leading], dim=1).view(torch.float32).view(-1)


class PrecisionAwareAdam(FusedAdam):
    """The part of Transformer Engine's FusedAdam that Megatron uses."""

    def __init__(
        self,
        params: Any,
        *positional: Any,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, *positional, **options)
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, MASTER: master_weight_dtype}
        self.scales: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    def _dtype(self, parameter: torch.Tensor, name: str) -> torch.dtype:
        if name == MASTER and self.store_param_remainders and parameter.dtype == torch.bfloat16:
            return torch.int16
        return self.dtypes[name]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        for group in self.param_groups:
            for parameter in group["params"]:
                setattr(parameter, name, None)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool | None = None) -> None:
        """Initialize the moments with zeros, and the master with the parameter."""
        for name in MOMENTS:
            self.state[param][name] = torch.zeros_like(param, dtype=self.dtypes[name])
            self.scales[param, name] = torch.ones(())
        if not self.master_weights:
            return
        dtype = self._dtype(param, MASTER)
        self.state[param][MASTER] = torch.zeros_like(param, dtype=dtype)
        if dtype != torch.int16:
            self.set_scaled_state(param, MASTER, param.detach().clone().float())

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """Return a tensor of the state as fp32, or the remainders; fp32 tensors are not copied."""
        kept = self.state[param][state_name]
        if kept.dtype == torch.float16:
            return kept.float() * self.scales[param, state_name]
        return kept.float() if kept.dtype == torch.bfloat16 else kept

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Keep an fp32 tensor, or remainders, in the dtype of the state."""
        dtype = self._dtype(param, state_name)
        expected = torch.int16 if dtype == torch.int16 else torch.float32
        if unscaled_state.dtype != expected:
            raise AssertionError(f"{state_name}: {unscaled_state.dtype} in place of {expected}")
        if state_name not in self.state[param]:
            self.state[param][state_name] = torch.empty_like(param, dtype=dtype)
        if dtype == torch.float16:
            scale = unscaled_state.abs().max() / (torch.finfo(torch.float16).max / 2)
            self.scales[param, state_name] = scale
            unscaled_state = unscaled_state * torch.where(scale > 0, scale.reciprocal(), 0.0)
        self.state[param][state_name].copy_(unscaled_state)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with every tensor unscaled."""
        described = super().state_dict()
        described["state"] = {
            number: {name: self.get_unscaled_state(parameter, name) for name in self.state[parameter]}
            for number, parameter in self._numbered(described)
            if number in described["state"]
        }
        return described

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but no tensor takes the dtype of its parameter."""
        super().load_state_dict(state_dict)
        for number, parameter in self._numbered(state_dict):
            if number in state_dict["state"]:
                self.state[parameter] = {}
                for name, value in state_dict["state"][number].items():
                    remainders = self._dtype(parameter, name) == torch.int16
                    self.set_scaled_state(parameter, name, value if remainders else value.float())

    def _numbered(self, described: dict[str, Any]) -> list[tuple[int, torch.Tensor]]:
        numbers = [number for group in described["param_groups"] for number in group["params"]]
        return list(zip(numbers, (p for group in self.param_groups for p in group["params"]), strict=True))

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return getattr(parameter, "decoupled_grad", None) if self.use_decoupled_grad else parameter.grad

    def _advance(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.initialize_state(parameter)
        moments = [self.get_unscaled_state(parameter, name) for name in MOMENTS]
        has_master = MASTER in self.state[parameter] and parameter.dtype != torch.float32
        if not has_master:
            master = parameter
        elif self._dtype(parameter, MASTER) == torch.int16:
            master = join(parameter.data, self.state[parameter][MASTER])
        else:
            master = self.get_unscaled_state(parameter, MASTER)
        advance(master, gradient, moments[0], moments[1], group, self.adam_w_mode)
        for name, moment in zip(MOMENTS, moments, strict=True):
            self.set_scaled_state(parameter, name, moment)
        if has_master:
            self._keep(parameter, master)

    def _keep(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        if self._dtype(parameter, MASTER) == torch.int16:
            rounded, kept = split(master)
        else:
            rounded, kept = master.to(parameter.dtype), master
        parameter.data.copy_(rounded)
        self.set_scaled_state(parameter, MASTER, kept)


def install() -> None:
    """Give Megatron's optimizers this class for Transformer Engine's, which stays missing for everybody else."""
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    config: Any = importlib.import_module("megatron.core.optimizer.optimizer_config")
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    for module in (optimizer, config):
        module.is_te_min_version = lambda *_, **__: True
    optimizer.Adam = distributed.Adam = PrecisionAwareAdam
    distributed.USING_TE_OPTIMIZER, distributed.USING_APEX_OPTIMIZER = True, False
    config.OptimizerConfig.__post_init__ = _checked_with_the_class(config.OptimizerConfig.__post_init__)


def _checked_with_the_class(original: Any) -> Any:
    modules = {name: types.ModuleType(name) for name in (_TRANSFORMER_ENGINE, f"{_TRANSFORMER_ENGINE}.pytorch")}
    modules[_OPTIMIZERS] = types.ModuleType(_OPTIMIZERS)
    modules[_OPTIMIZERS].FusedAdam = PrecisionAwareAdam  # type: ignore[attr-defined]

    def post_init(self: Any) -> None:
        if os.environ.get(REMAINDERS_VARIABLE) == "0" and self.use_precision_aware_optimizer:
            self.store_param_remainders = False
        before = {name: sys.modules[name] for name in modules if name in sys.modules}
        sys.modules.update(modules)
        try:
            original(self)
        finally:
            for name in modules:
                sys.modules.pop(name, None)
            sys.modules.update(before)

    return post_init


if __name__ == "<run_path>":  # as a plugin
    importlib.import_module("megatron_on_cpu.precision_aware").install()
