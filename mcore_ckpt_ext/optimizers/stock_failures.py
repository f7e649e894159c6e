"""Failures of stock Megatron with intact optimizer state that the stored state alone can show.

The checks of a live load (`megatron/policy.py`) and the account of a checkpoint (`operations/stored_failures.py`) share
the rows. Whether a row applies follows from the facts of the load, or from what is stored.
"""

from __future__ import annotations

from typing import NamedTuple

_OPTIMIZER = "megatron/core/optimizer/distrib_optimizer.py"


class StockFailure(NamedTuple):
    """A row.

    Attributes:
        name: the name by which a decision refers to it.
        consequence: what stock Megatron does, of which "it" is the subject.
        source: the framework's function and file, with the versions that were read.
    """

    name: str
    consequence: str
    source: str


CPU_OFFLOADING = StockFailure(
    "CPU offloading",
    "it gives the part on the CPU the step of dummy_step, which is 1",
    f"HybridDeviceOptimizer; load_state_dict, {_OPTIMIZER}, 0.16.1 to 0.19.2",
)
FP32_IN_PLACE = StockFailure(
    "fp32 parameters, in place",
    "it copies into views of leaves without no_grad, and fails",
    f"_set_main_param_and_optimizer_states, {_OPTIMIZER}, 0.15.0 to 0.19.2",
)
REMAINDERS_AS_FP32 = StockFailure(
    "remainders as fp32",
    "FusedAdam refuses remainders that are stored as fp32 masters",
    "transformer_engine/pytorch/optimizers/fused_adam.py, 2.1 to 2.20.2; Megatron to 0.19.2",
)
SHIFTED_PARAMETERS = StockFailure(
    "shifted parameters",
    "it loads the masters of other parameters, because it wrote them shifted",
    f"sharded_param_state_fully_reshardable, {_OPTIMIZER}, 0.15.0 to 0.19.2",
)
SETTINGS_OF_FUSED_ADAM = StockFailure(
    "settings of fused Adam",
    "it replaces the live parameter groups by stored ones without bias_correction, and the first step fails",
    f"load_state_dict, {_OPTIMIZER}, 0.16.1 to 0.19.2; step, transformer_engine/pytorch/optimizers/fused_adam.py",
)
