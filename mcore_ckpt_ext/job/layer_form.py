"""Changes the arguments that decide whether Megatron stacks the layers of a model, and nothing else.

`--moe-layer-freq` may say the same as a number and as a list, and `hetereogenous_dist_checkpoint` changes only the keys
(`TransformerBlock.sharded_state_dict`, megatron/core/transformer/transformer_block.py, core_v0.10.0 to 0.19.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UsageError, format_value, join_some, quantity
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import complete, has_experts

_FREQUENCY = "moe_layer_freq"
LAYER_FORM = frozenset({_FREQUENCY, "hetereogenous_dist_checkpoint"})
"""Arguments that may describe the same model in either form."""
_HINT = "pass the pattern of the script that will load it, for example moe_layer_freq=([0]*1+[1]*47)"


def check_layer_form(written: JobArguments, changes: Mapping[str, Any]) -> None:
    """Refuse a change of these arguments that describes another model.

    Args:
        written: the arguments of the job that wrote the checkpoint.
        changes: arguments of the job that will read it, other ones included.

    Raises:
        UsageError: the pattern is invalid, or other layers would have experts.
    """
    if _FREQUENCY not in changes or not written.num_layers:
        return
    try:
        other = written.replace(moe_layer_freq=changes[_FREQUENCY])
    except UnreadableCheckpointError as error:
        raise UsageError(
            f"invalid {_FREQUENCY} for {quantity(written.num_layers, 'layer')}",
            found=format_value(changes[_FREQUENCY]),
            hint=_HINT,
        ) from error
    models = [complete(written), complete(other)]
    layers = range(written.num_layers)
    stored, changed = ([layer for layer in layers if has_experts(model, layer)] for model in models)
    if stored != changed:
        raise UsageError(
            f"this {_FREQUENCY} describes another model than the checkpoint's",
            found=f"experts in layer {join_some(list(map(str, changed)), 6) or 'none'}",
            expected=f"experts in layer {join_some(list(map(str, stored)), 6) or 'none'}",
            hint=_HINT,
        )


def note_on(changes: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for the job that loads a checkpoint whose layers are stored in another form."""
    for name, value in changes.items():
        pattern = str(value).replace(" ", "")
        yield f"its layers are stored as with {name} {pattern}: stock Megatron loads it with the same setting only"
