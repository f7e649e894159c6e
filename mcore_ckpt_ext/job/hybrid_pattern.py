"""The kind of each layer of a hybrid model: a letter for each, as in `M*M-`."""

from __future__ import annotations

from mcore_ckpt_ext.job.job_arguments import JobArguments

_MAMBA, _ATTENTION, _FEED_FORWARD = "M*-"


def is_hybrid(job: JobArguments) -> bool:
    """Return whether a model has layers of several kinds, each with one part of a transformer's layer."""
    return bool(layer_pattern(job))


def layer_pattern(job: JobArguments) -> str:
    """Return a letter for each layer, and `|` between segments if the pattern names them.

    Empty for other models.

    Sources: `hybrid_layer_pattern` and `hybrid_override_pattern` (its name up to core_v0.16), and `allocate_layers`
    (megatron/core/ssm/mamba_hybrid_layer_allocation.py, core_v0.8.0 to 0.16.1) for models with ratios instead. The part
    after a slash belongs to multi-token prediction.
    """
    pattern = job.hybrid_layer_pattern or job.raw.get("hybrid_override_pattern")
    if pattern:
        return str(pattern).partition("/")[0]
    attention, feed_forward = (_ratio(job, name) for name in ("hybrid_attention_ratio", "hybrid_mlp_ratio"))
    if not job.num_layers or not 0 < attention + feed_forward <= 1:
        return ""
    layers = _MAMBA * job.num_layers
    layers = _spread(layers, round(len(layers) * attention), _ATTENTION, ends_with_mamba=True)
    return _spread(layers, round(len(layers) * feed_forward), _FEED_FORWARD, ends_with_mamba=False)


def _ratio(job: JobArguments, name: str) -> float:
    value = job.raw.get(name)
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else 0.0


def _spread(layers: str, count: int, kind: str, *, ends_with_mamba: bool) -> str:
    """Replace so many Mamba layers by others, evenly spaced, as `_allocate_auto`."""
    if not count:
        return layers
    length = (layers.count(_MAMBA) - count) / (count + ends_with_mamba)
    remaining = length
    letters = []
    for letter in layers:
        is_replaced = letter == _MAMBA and remaining < 0.5
        letters.append(kind if is_replaced else letter)
        if letter == _MAMBA:
            remaining += length if is_replaced else -1
    return "".join(letters)
