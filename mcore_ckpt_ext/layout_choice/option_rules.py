"""Options of a job that exclude layouts, whatever the model: one row each, with its source.

`validate_args` (megatron/training/arguments.py) and the configurations check them. Unless a row names other versions,
they were read in core_v0.14.0 to 0.19.2. Options of which releases have none are never set there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from mcore_ckpt_ext.job.releases import CHECKS_EVALUATION
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.choice import Choice


@dataclass(frozen=True, slots=True)
class OptionRule:
    """A switch of Megatron that needs certain sizes.

    Attributes:
        argument: the name of the argument.
        allows: whether a layout has such sizes.
        needs: the sizes, in words.
    """

    argument: str
    allows: Callable[[ParallelLayout], bool]
    needs: str


OPTION_RULES = (
    OptionRule("use_torch_fsdp2", lambda sizes: sizes.pipeline == sizes.expert == 1, "PP 1 and EP 1"),
    OptionRule("cpu_offloading", lambda sizes: sizes.pipeline == 1, "PP 1"),
    OptionRule("hybrid_context_parallel", lambda sizes: sizes.pipeline == 1, "PP 1"),
    OptionRule("batch_invariant_mode", lambda sizes: sizes.context == 1, "CP 1"),
    OptionRule("distribute_saved_activations", lambda sizes: sizes.tensor > 1, "TP 2 or more"),
    OptionRule("defer_embedding_wgrad_compute", lambda sizes: sizes.pipeline > 1, "PP 2 or more"),
    OptionRule("overlap_param_gather_with_optimizer_step", lambda sizes: sizes.virtual_pipeline > 1, "virtual stages"),
)
"""Sources: `validate_args`; `TransformerConfig.__post_init__` for `cpu_offloading` and `batch_invariant_mode`
(core_v0.16.0 to 0.19.2); `ModelParallelConfig.__post_init__` for `defer_embedding_wgrad_compute`."""


def check_options(choice: Choice) -> str | None:
    """Return why an option of the job excludes a layout; None if none does."""
    raw = choice.job.raw
    layout = choice.layout
    for rule in OPTION_RULES:
        if raw.get(rule.argument) is True and not rule.allows(layout):
            return f"--{rule.argument.replace('_', '-')} needs {rule.needs}"
    return _hierarchical(choice) or _sparse_attention(choice)


def _hierarchical(choice: Choice) -> str | None:
    """`validate_args`: hierarchical context parallel sizes have the product CP (core_v0.10.0 to 0.19.2)."""
    sizes: object = choice.job.raw.get("hierarchical_context_parallel_sizes")
    if not isinstance(sizes, (list, tuple)) or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    if prod(sizes) == choice.layout.context:
        return None
    return f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} is not CP {choice.layout.context}"


def _sparse_attention(choice: Choice) -> str | None:
    """`TransformerConfig`: sparse attention gathers under context parallelism (0.19.0, 0.19.2)."""
    job = choice.job
    kinds: object = job.raw.get("cp_comm_type")
    if job.experimental_attention_variant != "dsa" or choice.layout.context == 1:
        return None
    named = kinds if isinstance(kinds, (list, tuple)) else [kinds]
    if all(str(kind).replace("_", "").lower() == "allgather" for kind in named):
        return None
    return "sparse attention needs --cp-comm-type allgather for context parallelism"


def check_evaluation(choice: Choice) -> str | None:
    """`validate_args`: the batch of evaluation is a multiple of its micro batch x DP.

    Both are those of training unless the job states others; the batch is never decreased (core_v0.18.0 to 0.19.2).
    """
    if not CHECKS_EVALUATION.is_of(choice.version):
        return None
    job = choice.job
    micro = _evaluation_size(choice, "eval_micro_batch_size", job.micro_batch_size) or choice.micro_batch
    derived = choice.micro_batch * choice.layout.data if job.step_batch_size_schedule else choice.global_batch
    whole = _evaluation_size(choice, "eval_global_batch_size", job.global_batch_size) or derived
    share = micro * choice.layout.data
    if whole % share == 0:
        return None
    return f"--eval-global-batch-size {whole} is not a multiple of its micro batch x DP = {share}"


def _evaluation_size(choice: Choice, name: str, of_training: int | None) -> int | None:
    """Return a size of evaluation that is not the one of training, after which Megatron sets it."""
    value: object = choice.job.raw.get(name)
    return value if isinstance(value, int) and value > 0 and value != of_training else None
