"""Names the arguments of flags whose words are not the name under which Megatron stores them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mcore_ckpt_ext.job.arguments.table import ROWS
from mcore_ckpt_ext.job.arguments.without_effect import arguments_without_effect

_OFF = ("no_", "disable_")
_OTHERS: Mapping[str, str] = {
    "bert_no_binary_head": "bert_binary_head=False",
    "disable_gloo_process_groups": "use_gloo_process_groups=False",
    "disable_mamba_mem_eff_path": "use_mamba_mem_eff_path=False",
    "fp4_format": "fp4",
    "fp8_format": "fp8",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "muon_no_split_qkv": "muon_split_qkv=False",
    "no_barrier_with_level_1_timing": "barrier_with_L1_time=False",
    "no_initialization": "perform_initialization=False",
    "no_one_logger": "enable_one_logger=False",
    "no_overlap_p2p_communication": "overlap_p2p_comm=False",
    "no_position_embedding": "add_position_embedding=False",
    "no_rope_fusion": "apply_rope_fusion=False",
    "output_logit_dtype": "logit_dtype",
    "overlap_p2p_communication_warmup_flush": "overlap_p2p_comm_warmup_flush=True",
    "persistent_save_interval": "save_interval",
    "tokenizer_metadata": "metadata_path",
    "tokenizer_special_tokens": "special_tokens",
    "torch_fsdp2_no_reshard_after_forward": "torch_fsdp2_reshard_after_forward=False",
    "use_nccl_ub": "nccl_ub=True",
    "use_same_sampling_seed_across_dp_ranks": "offset_sampling_seed_by_dp_rank=False",
}
"""Flags whose argument follows neither from its row nor from `no` or `disable` before its name.

Source: the parsers of megatron/training/arguments.py, core_v0.16.1, 0.19.2 and the development head of August 2026.
"""


def _words_of_rows() -> Iterator[tuple[str, str]]:
    values = {"on": "=True", "off": "=False", "value": ""}
    for name, row in ROWS.items():
        if row.flag is not None:
            yield row.flag.spelling(name).removeprefix("--").replace("-", "_"), name + values[row.flag.form]


_STORED: Mapping[str, str] = {**dict(_words_of_rows()), **_OTHERS}


def stored_argument(words: str) -> str | None:
    """Return the argument of a flag, with the value of a switch; None if its words are the name.

    Args:
        words: the words of the flag, joined by underscores.
    """
    if words in ROWS:
        return None
    stored = _STORED.get(words)
    if stored is not None or arguments_without_effect([words]):
        return stored
    named = next((words.removeprefix(off) for off in _OFF if words.startswith(off)), "")
    return f"{named}=False" if named in ROWS or arguments_without_effect([named]) else None
