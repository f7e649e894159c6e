"""Returns the flags of `pretrain_gpt.py` for a model from Hugging Face.

`--use-checkpoint-args` only sets some of them; for example, it sets neither the epsilon of norms nor arguments of
latent attention (`load_args_from_checkpoint`, megatron/training/checkpointing.py, core_v0.19.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mcore_ckpt_ext.job.arguments.row import Flag
from mcore_ckpt_ext.job.arguments.table import ROWS
from mcore_ckpt_ext.job.model_arguments import ModelArguments

# Arguments without a flag that pretrain_gpt.py passes on to the model, so that a job has the default; Megatron-Bridge
# can set all of them. The first is passed on since 0.19 (`PASSES_ON_INTERPOLATION`).
_WITHOUT_FLAG_UNTIL_0_18 = ("rotary_seq_len_interpolation_factor",)
_WITHOUT_FLAG_LLAMA_3 = ("rope_scaling_factor",)
_WITHOUT_FLAG_LATENT = ("beta_fast", "beta_slow", "original_max_position_embeddings")


def training_flags(arguments: ModelArguments) -> list[str]:
    """Return the flags that describe the model, without those for layout, data and optimizer."""
    words: list[str] = []
    for name, flag in _flags("value", arguments):
        value = arguments.get(name)
        if value is not None and value != ROWS[name].value_without_flag:
            text = str(value)
            words += [flag.spelling(name), text.replace(" ", "") if isinstance(value, (list, tuple)) else text]
    if arguments.num_query_groups != arguments.num_attention_heads:
        words += ["--group-query-attention", "--num-query-groups", str(arguments.num_query_groups)]
    words += [flag.spelling(name) for name, flag in _flags("on", arguments) if arguments.get(name)]
    return words + [flag.spelling(name) for name, flag in _flags("off", arguments) if not arguments.get(name)]


def _flags(form: str, arguments: ModelArguments) -> Iterator[tuple[str, Flag]]:
    """Yield the arguments of a model that have a flag of some form."""
    for name, row in ROWS.items():
        if row.flag and row.flag.form == form and row.flag.applies(arguments.get):
            yield name, row.flag


def arguments_without_flag(arguments: ModelArguments, *, since_0_19: bool) -> dict[str, Any]:
    """Return arguments that no flag of `pretrain_gpt.py` sets, so that such a job computes another model.

    `since_0_19`: the job uses release 0.19 or a later one.
    """
    names: tuple[str, ...] = () if since_0_19 else _WITHOUT_FLAG_UNTIL_0_18
    if arguments.use_rope_scaling:
        names += _WITHOUT_FLAG_LLAMA_3
    if arguments.multi_latent_attention and arguments.rope_type != "rope":
        names += _WITHOUT_FLAG_LATENT
    changed = _not_default(names, arguments)
    if arguments.rotary_base != int(arguments.rotary_base):  # `--rotary-base` takes whole numbers
        changed["rotary_base"] = arguments.rotary_base
    return changed


def ignored_arguments(arguments: ModelArguments) -> dict[str, Any]:
    """Return arguments whose flag some release of `pretrain_gpt.py` does not pass on to its model."""
    return _not_default(
        (*_WITHOUT_FLAG_UNTIL_0_18, *(_WITHOUT_FLAG_LLAMA_3 if arguments.use_rope_scaling else ())), arguments
    )


def _not_default(names: Iterable[str], arguments: ModelArguments) -> dict[str, Any]:
    values = {name: arguments.value(name) for name in names}
    return {name: value for name, value in values.items() if value != ROWS[name].values.default}
