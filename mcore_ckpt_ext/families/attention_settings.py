"""Settings of attention that several families share: query groups, sizes of heads, sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.families.config_checks import Config, checked_divisor, checked_size, unrepresentable
from mcore_ckpt_ext.families.settings import Custom, Excludes, Setting
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_LARGEST_WINDOW = 1 << 40


def query_groups(default: int | None = None) -> Setting:
    """Return the setting of query groups.

    Args:
        default: Hugging Face's default; None if that is the number of heads.
    """
    key = "num_key_value_heads"

    def to_arguments(config: Config) -> dict[str, Any]:
        heads = config["num_attention_heads"]
        groups = checked_divisor(key, config.get(key, default) or heads, heads)
        return {"group_query_attention": groups != heads, "num_query_groups": groups}

    return Custom((key,), lambda arguments: {key: arguments.num_query_groups}, to_arguments)


def head_size(always: bool = False, default: int | None = None) -> Setting:
    """Return the setting of the head size, written only if it does not follow from other sizes.

    If `always` is set, it is written in any case. `default` is the value of Hugging Face's class for a missing key;
    None means the hidden size divided by the number of heads.
    """

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        implied = arguments.kv_channels * arguments.num_attention_heads == arguments.hidden_size
        return {} if implied and not always else {"head_dim": arguments.kv_channels}

    def to_arguments(config: Config) -> dict[str, Any]:
        implied = config["hidden_size"] // config["num_attention_heads"]
        return {"kv_channels": checked_size("head_dim", config.get("head_dim", default) or implied)}

    return Custom(("head_dim",), to_config, to_arguments)


def _why_not_implied(arguments: ModelArguments) -> list[str]:
    implied = arguments.kv_channels * arguments.num_attention_heads == arguments.hidden_size
    return [] if implied else ["heads with their own size"]


def _why_grouped(arguments: ModelArguments) -> list[str]:
    return [] if arguments.num_query_groups == arguments.num_attention_heads else ["grouped queries"]


IMPLIED_HEAD_SIZE = Excludes(_why_not_implied)
"""The head size always follows from the other sizes."""
NO_QUERY_GROUPS = Excludes(_why_grouped)
"""Each head has its own key and value."""


def window(size: int | None) -> dict[str, Any]:
    """Return the arguments for a sliding window of `size` tokens, including the token itself.

    Megatron only counts the tokens before it (`get_sliding_window_causal_mask`, megatron/core/transformer/utils.py).
    """
    return {"window_size": None if size is None else (checked_size("sliding_window", size, _LARGEST_WINDOW) - 1, 0)}


def window_of(arguments: ModelArguments) -> int | None:
    """Return the size of the sliding window in tokens, including the token itself; None if there is none."""
    return int(arguments.window_size[0]) + 1 if arguments.window_size else None


def why_no_window(arguments: ModelArguments) -> list[str]:
    """Return the reason why Hugging Face cannot express a window, if there is one.

    Megatron's local layer spec also lets a token attend to as many later tokens as the second number. A first number of
    -1 means all earlier tokens, or none, depending on the spec.
    """
    size = arguments.window_size
    if size is None or (size[0] >= 0 and size[1] == 0):
        return []
    wider = f"; Transformer Engine's spec takes the second number for 0: --argument window_size=[{size[0]},0]"
    return [f"window_size is {size}, not a window over tokens before alone, (N, 0){wider if size[0] >= 0 else ''}"]


def layers_with_window(window_size: Any, frequency: int | Sequence[int] | None, layers: int) -> list[bool]:
    """Return for each layer whether it uses the window (`window_size` and `window_attn_skip_freq`).

    Layers are counted from 1. A layer skips the window if the frequency divides its number, or if a list has a 0 for it
    (`is_layer_window_attention`, megatron/core/transformer/utils.py, core_v0.16 to 0.19.2).
    """
    if not window_size:
        return [False] * layers
    if isinstance(frequency, Sequence):
        return [bool(flag) for flag in frequency]
    return [not frequency or (layer + 1) % frequency != 0 for layer in range(layers)]


def windows_in_some_layers(size: int | None, every: int, older_key: str | None = None) -> Setting:
    """Return the setting of a sliding window in some layers, which `layer_types` lists.

    Args:
        size: size of the window if the key is missing.
        every: one in this many layers has no window if `layer_types` is missing.
        older_key: key with the value of `every` in folders without `layer_types`.
    """

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        sees = layers_with_window(arguments.window_size, arguments.window_attn_skip_freq, arguments.num_layers)
        return {
            # transformers requires a width even if no layer uses the window.
            "sliding_window": window_of(arguments) if any(sees) else size,
            "layer_types": ["sliding_attention" if is_windowed else "full_attention" for is_windowed in sees],
        }

    def to_arguments(config: Config) -> dict[str, Any]:
        layers = range(config["num_hidden_layers"])
        interval = config.get(older_key, every) if older_key else every
        if type(interval) is not int or interval < 1:
            raise unrepresentable(str(older_key), interval, "a whole number above 0")
        usual = [(layer + 1) % interval != 0 for layer in layers]
        kinds = config.get("layer_types")
        sees = usual if kinds is None else [kind == "sliding_attention" for kind in kinds]
        if len(sees) != len(layers) or not {*(kinds or ())} <= {"sliding_attention", "full_attention"}:
            raise unrepresentable("layer_types", kinds, "sliding_attention or full_attention, for each layer")
        width = config.get("sliding_window", size)
        if any(sees) and not width:
            raise UnsupportedCheckpointError(
                "config.json has layers with sliding-window attention, but no window",
                found=f"sliding_window: {width}",
                expected="a whole number above 0, or no sliding_attention among layer_types",
                where="config.json",
            )
        frequency = None if all(sees) or not any(sees) else interval if sees == usual else [int(flag) for flag in sees]
        return {**window(width if any(sees) else None), "window_attn_skip_freq": frequency}

    expressed = ("window_size", "window_attn_skip_freq")
    keys = ("sliding_window", "layer_types", *([older_key] if older_key else []))
    return Custom(keys, to_config, to_arguments, why_no_window, expressed)


def sliding_window(absent: int | None) -> Setting:
    """Return the setting of a sliding window in all layers; `absent` is the value for a missing key."""
    key = "sliding_window"
    return Custom(
        (key,),
        lambda arguments: {key: window_of(arguments)},
        lambda config: window(config.get(key, absent)),
        why_no_window,
        expressed=("window_size",),
    )


def check_kinds_of_attention(config: Config, *kinds: str) -> None:
    """Check that `layer_types`, if present, lists one of `kinds` for each layer.

    As transformers does (`validate_layer_type`, configuration_utils.py, 5.23).
    """
    listed = config.get("layer_types") or []
    layers = config["num_hidden_layers"]
    others = [kind for kind in listed if kind not in kinds]
    if others or (listed and len(listed) != layers):
        counts = f"{quantity(len(listed), 'kind')} for {quantity(layers, 'layer')}"
        raise unrepresentable("layer_types", others[0] if others else counts, f"{kinds[0]} in every layer")


def full_attention(*more: str, reaches: Callable[[Config], bool] = lambda config: True) -> Setting:
    """Return the setting without sliding windows, which checks `layer_types` and the switches `more`.

    Args:
        more: keys that must be false.
        reaches: returns whether a window that is switched on reaches a layer of the class.
    """
    switch = "use_sliding_window"

    def to_arguments(config: Config) -> dict[str, Any]:
        for key in (switch, *more) if reaches(config) else more:
            if config.get(key):
                raise unrepresentable(key, config[key], "False")
        check_kinds_of_attention(config, "full_attention")
        return {}

    return Custom((switch, *more, "layer_types"), lambda arguments: {switch: False}, to_arguments)


def has_window(absent: int | None) -> Callable[[Config], bool]:
    """Return a function that returns whether a window has a size; `absent` is the class's default.

    Without a size, there is no window (models/qwen3_moe/configuration_qwen3_moe.py and
    models/smollm3/configuration_smollm3.py, `__post_init__`, transformers 4.53 to 5.23).
    """
    return lambda config: config.get("sliding_window", absent) is not None


def window_begins(config: Config) -> bool:
    """Return whether the window of Qwen2 and Qwen3 begins in a layer of the model.

    It begins behind the first `max_window_layers` layers; `layer_types` takes precedence
    (models/qwen2/configuration_qwen2.py and models/qwen3/configuration_qwen3.py, transformers 4.53 to 5.23).
    """
    first = config.get("max_window_layers", 28)
    is_behind = type(first) is int and first >= config["num_hidden_layers"]
    return has_window(4096)(config) and config.get("layer_types") is None and not is_behind
