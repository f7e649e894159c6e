"""Names in `fsdp_dtensor`: module names with wrappers' prefixes, gated projections in halves.

Sources: `_param_name` and `sharded_param_state_fsdp_dtensor` (megatron/core/optimizer/distrib_optimizer.py),
`handle_swiglu_in_state_dict` and `handle_experts_in_state_dict` (megatron/core/transformer/fsdp_dtensor_checkpoint.py),
core_v0.14.0 to 0.19.2: experts are numbered across the whole model. With SwiGLU the gate of `linear_fc1` is stored as
`_w`, the up projection as `_v`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_parameters import LocalNames, model_space_name
from mcore_ckpt_ext.layout.parameter_parts import check_whole
from mcore_ckpt_ext.model_space.names import is_first_linear, strip_wrappers
from mcore_ckpt_ext.versions import NEWEST

MODEL = "model.module."
STATE = "optimizer.state.module.module.module."
GROUPS = "optimizer.param_to_group_meta.module.module.module."
HALVES = ("w", "v")
"""The gate, then the up projection, in the order of their rows in the whole parameter."""

_HALF = re.compile(r"^(?P<whole>.*\.linear_fc1\.(?:weight|bias)\d*)_(?P<half>[wv])$")
# An MTP layer contains an ordinary layer, in a module that was renamed
# (`MultiTokenPredictionLayer`, megatron/core/transformer/multi_token_prediction.py); its keys are unchanged.
_MTP = re.compile(r"^mtp\.layers\.(\d+)\.(?:transformer_layer|mtp_model_layer)\.(.+)$")
_AS_LAYER = "decoder.layers.0."


class Stored(NamedTuple):
    """The content of an array: a parameter, or half of one (0: gate, 1: up projection; None: all of it)."""

    name: str
    half: int | None


def parameter_of(module_name: str, arguments: JobArguments) -> Stored:
    """Return the parameter stored under a module's name, with or without the prefixes of wrappers.

    Raises:
        UnsupportedCheckpointError: the order of its elements is not supported.
    """
    match = _HALF.match(module_name)
    name = strip_wrappers(match["whole"] if match else module_name).lstrip(".")
    half = HALVES.index(match["half"]) if match else None
    if mtp := _MTP.match(name):
        inner = model_space_name(_AS_LAYER + mtp[2], 0, 0, arguments).removeprefix(_AS_LAYER)
        return Stored(f"mtp.layers.{mtp[1]}.transformer_layer.{inner}", half)
    return Stored(check_whole(model_space_name(name, 0, 0, arguments), "Megatron-FSDP"), half)


class ModuleNames:
    """Module names of parameters, for a job with given arguments; the inverse of `parameter_of`."""

    def __init__(self, arguments: JobArguments) -> None:
        """Raise UnsupportedCheckpointError if the job's arrangement of experts is not supported."""
        self._names = LocalNames(arguments, NEWEST)
        self._is_gated = bool(arguments.swiglu)

    def of(self, name: str) -> str:
        """Return the module's name of a parameter.

        Raises:
            UnsupportedCheckpointError: it belongs to an MTP layer, whose module names depend on the version, or the
                order of its elements is not supported.
        """
        if name.startswith("mtp."):
            raise UnsupportedCheckpointError(
                "multi-token prediction (MTP) layers are not written for Megatron-FSDP",
                where=name,
                hint="use --to torch_dist",
            )
        return self._names.local(check_whole(name, "Megatron-FSDP"), 0, 0, tied_copy=False)

    def halves(self, name: str) -> bool:
        """Return whether a parameter is stored in two halves."""
        return self._is_gated and is_first_linear(name)
