"""The rules by which Megatron accepts or refuses a parallel layout for a model, with their sources.

A rule is a function of a `Choice` that returns why Megatron refuses it, or None. The list `RULES` has all of them,
those of `expert_rules` and `option_rules` included; candidates, refusals and the documentation are made from it. Unless
a rule names other versions, it was read in core_v0.12.0 to 0.19.2 and the development head of August 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.job.hybrid_pattern import is_hybrid, layer_pattern
from mcore_ckpt_ext.job.releases import SHARES_QUERY_GROUPS
from mcore_ckpt_ext.layout.parallel import prediction_chunk
from mcore_ckpt_ext.layout_choice.choice import Choice
from mcore_ckpt_ext.layout_choice.expert_rules import (
    check_expert_biases,
    check_expert_tensor,
    check_expert_world_size,
    check_experts,
    check_overlapped_experts,
)
from mcore_ckpt_ext.layout_choice.option_rules import check_evaluation, check_options

Rule = Callable[[Choice], "str | None"]


def _world_size(choice: Choice) -> str | None:
    """`validate_args`: the world size is a multiple of TP x PP x CP."""
    layout = choice.layout
    needed = layout.tensor * layout.pipeline * layout.context
    if layout.world % needed:
        factors = f"{layout.world} = {_factors(layout.world)}"
        return f"{quantity(layout.world, 'GPU is', 'GPUs are')} not a multiple of TP x PP x CP = {needed} ({factors})"
    return None


def _factors(number: int) -> str:
    """Return the prime factors of a number: `2^7 x 3`."""
    powers = list[str]()
    prime = 2
    while number > 1:
        power = 0
        if prime * prime > number:
            prime = number
        while number % prime == 0:
            number = number // prime
            power = power + 1
        if power:
            powers.append(f"{prime}^{power}" if power > 1 else f"{prime}")
        prime += 1
    return " x ".join(powers) or "1"


def _rank_order(choice: Choice) -> str | None:
    """`initialize_model_parallel`: `--use-tp-pp-dp-mapping` needs equal data parallel sizes.

    The sizes are those for experts and for other parameters.
    """
    layout = choice.layout
    if not choice.job.use_tp_pp_dp_mapping or layout.pipeline == 1:
        return None
    if layout.expert_data == layout.data:
        return None
    return "--use-tp-pp-dp-mapping needs as many data-parallel ranks for experts"


def _optimizer_instances(choice: Choice) -> str | None:
    """`initialize_model_parallel`: optimizer instances divide all kinds of data-parallel ranks.

    Source: parallel_state.py, "Data parallel size should be divisible by partial DistOpt shard factor", core_v0.10.0 to
    0.19.2.
    """
    layout = choice.layout
    instances = choice.instances
    for ranks, label in (
        (layout.data * layout.context, "data-parallel ranks"),
        (layout.expert_data, "ranks of experts"),
    ):
        if ranks % instances:
            return f"--num-distributed-optimizer-instances {instances} does not divide the {ranks} {label}"
    return None


def _heads(choice: Choice) -> str | None:
    """`TransformerConfig.__post_init__`: attention heads are divided among the tensor-parallel ranks."""
    heads = choice.job.num_attention_heads
    if heads and heads % choice.layout.tensor:
        return f"{quantity(heads, 'attention head')} cannot be divided by TP {choice.layout.tensor}"
    return None


def _query_groups(choice: Choice) -> str | None:
    """`TransformerConfig.__post_init__`: query groups are divided, too.

    Since 0.16 several ranks may share one.
    """
    job = choice.job
    tensor = choice.layout.tensor
    groups = job.num_query_groups if job.group_query_attention else None
    may_share = SHARES_QUERY_GROUPS.is_of(choice.version)
    if not groups or groups % tensor == 0 or (may_share and tensor % groups == 0):
        return None
    return f"{quantity(groups, 'query group')} cannot be divided by TP {tensor}"


def _linear_attention(choice: Choice) -> str | None:
    """`TransformerConfig.__post_init__`: heads of a gated delta net are a multiple of TP x CP.

    It applies from core_v0.16.0 on.
    """
    job = choice.job
    ranks = choice.layout.tensor * choice.layout.context
    if not job.experimental_attention_variant or not job.linear_num_key_heads:
        return None
    for name, heads in (("key", job.linear_num_key_heads), ("value", job.linear_num_value_heads)):
        if heads and heads % ranks:
            return f"{quantity(heads, f'{name} head')} of linear attention cannot be divided by TP x CP = {ranks}"
    return None


def _mamba(choice: Choice) -> str | None:
    """`MambaMixer.__init__` and `MambaContextParallel.__init__`: heads are a multiple of TP x CP.

    The number of groups is a multiple of TP. Context-parallel ranks divide the groups of a tensor-parallel rank evenly,
    or several share one. Source: megatron/core/ssm.
    """
    job = choice.job
    tensor = choice.layout.tensor
    context = choice.layout.context
    if "M" not in layer_pattern(job):
        return None
    # By default there are heads of `--mamba-head-dim` for twice the hidden size (`expand`).
    heads = job.mamba_num_heads or 2 * (job.hidden_size or 0) // (job.mamba_head_dim or 64)
    groups = job.mamba_num_groups
    if heads and heads % (tensor * context):
        return f"{quantity(heads, 'Mamba head')} cannot be divided by TP x CP = {tensor * context}"
    if not groups:
        return None
    if groups % tensor or max(groups // tensor, context) % min(groups // tensor, context):
        return f"{quantity(groups, 'Mamba group')} cannot be divided by TP {tensor} and CP {context}"
    return None


def _parameters(choice: Choice) -> str | None:
    """`divide` (megatron/core/utils.py): each rank has whole rows or columns of every sharded parameter."""
    return choice.table.indivisible(choice.layout.tensor, choice.layout.expert_tensor)


def _sequence(choice: Choice) -> str | None:
    """`validate_args`: with context parallelism the sequence length is a multiple of 2 x CP.

    If activations are divided along the sequence, each part is a multiple of TP (`_split_along_first_dim`,
    tensor_parallel/mappings.py).
    """
    length = choice.job.seq_length
    layout = choice.layout
    if not length:
        return None
    if layout.context > 1 and length % (2 * layout.context):
        return f"--seq-length {length} is not a multiple of 2 x CP = {2 * layout.context}"
    if choice.has_sequence_parallelism and (length // layout.context) % layout.tensor:
        return f"--seq-length {length} cannot be divided by CP x TP = {layout.context * layout.tensor}"
    return None


def _attention_of_context(choice: Choice) -> str | None:
    """`DotProductAttention.__init__`: the local layer spec has no context parallelism.

    Source: dot_product_attention.py.
    """
    if choice.layout.context > 1 and choice.job.transformer_impl == "local":
        return "--transformer-impl local has no context parallelism"
    return None


def _layers(choice: Choice) -> str | None:
    """`validate_args` and `TransformerConfig.__post_init__`: every stage has a whole number of layers."""
    if choice.split is not None:
        return None
    layout = choice.layout
    chunks = f"PP {layout.pipeline}" + (f" x VPP {layout.virtual_pipeline}" if layout.virtual_pipeline > 1 else "")
    return f"{quantity(choice.job.num_layers or 0, 'layer')} cannot be divided among {chunks}"


def _tied_predictions(choice: Choice) -> str | None:
    """`tie_embeddings_and_output_weights_state_dict`: a stage that predicts has no tied output.

    A last stage with multi-token prediction has an output layer with a weight of its own besides its copy of the
    embedding, and then neither a save nor a load passes that function's assertion
    (megatron/core/models/common/language_module/language_module.py, and `skip_weight_param_allocation` in
    models/gpt/gpt_model.py, core_v0.12.0 to 0.19.2 and the development head of August 2026).
    """
    job = choice.job
    layout = choice.layout
    if not job.mtp_num_layers or job.untie_embeddings_and_output_weights or layout.pipeline == 1:
        return None
    split = dict(choice.split.arguments) if choice.split else {}
    if prediction_chunk(job.replace(**split), layout) != layout.last_chunk:
        return None
    return "with tied embeddings, Megatron neither saves nor loads multi-token prediction on the last of several stages"


def _shared_indexers(choice: Choice) -> str | None:
    """A layer that reuses the tokens chosen by an earlier layer is on the same stage as that layer.

    Source: `_validate_dsa_index_share_pipeline_split` (experimental_attention_variant_module_specs.py), from
    core_v0.19.0 on.
    """
    frequency = choice.job.dsa_indexer_topk_freq or 1
    offset = max(choice.job.dsa_indexer_skip_topk_offset or 0, 1)
    stages = () if choice.split is None else chain.from_iterable(choice.split.ranges)
    for layers in stages:
        if layers and max(layers.start + 1 - offset, 0) % frequency:
            return f"a pipeline stage begins with layer {layers.start + 1}, whose indexer is in the stage before"
    return None


def _hybrid_stages(choice: Choice) -> str | None:
    """`validate_args`: virtual stages of a hybrid model are the segments of its pattern.

    It applies from core_v0.17.0 on. The number of segments is a multiple of PP. A pattern without `|` has no virtual
    stages, and neither has any hybrid model of earlier versions (`MambaStack`, mamba_block.py). The stages of such
    models ignore the embedding and the loss.
    """
    job = choice.job
    layout = choice.layout
    if not is_hybrid(job):
        return None
    split = dict(choice.split.arguments) if choice.split else {}
    if accounted := next((name for name, value in split.items() if name.startswith("account_for") and value), None):
        return f"the stages of a hybrid model do not depend on --{accounted.replace('_', '-')}"
    segments = layer_pattern(job).count("|") + 1
    if segments == 1:
        return None if layout.virtual_pipeline == 1 else "a --hybrid-layer-pattern without | has no virtual stages"
    if segments == layout.pipeline * layout.virtual_pipeline:
        return None
    chunks = f"PP {layout.pipeline} x VPP {layout.virtual_pipeline}"
    return f"--hybrid-layer-pattern names {segments} segments, which is not {chunks}; give it with others (|)"


def _interleaving(choice: Choice) -> str | None:
    """`validate_args`: virtual stages need several pipeline ranks.

    Without overlapped transfers they need more than two.
    """
    layout = choice.layout
    if layout.virtual_pipeline == 1:
        return None
    # Without virtual stages, `validate_args` clears the flag, so the stored value may not be that of the command line.
    had_stages = choice.job.virtual_pipeline_model_parallel_size is not None
    least = 3 if had_stages and choice.job.raw.get("overlap_p2p_comm") is False else 2
    return None if layout.pipeline >= least else f"VPP {layout.virtual_pipeline} needs PP {least} or more"


def _micro_batches(choice: Choice) -> str | None:
    """The global batch is a multiple of the micro batch x DP.

    Source: `_build_num_microbatches_calculator` (num_microbatches_calculator.py). With virtual stages, the number of
    micro batches of each step is a multiple of PP, or `--microbatch-group-size-per-virtual-pipeline-stage` and what
    remains of it are at least PP (`forward_backward_pipelining_with_interleaving`, schedules.py).
    """
    layout = choice.layout
    share = choice.micro_batch * layout.data
    if choice.global_batch % share:
        return f"global batch {choice.global_batch} is not a multiple of micro batch x DP = {share}"
    if layout.virtual_pipeline == 1:
        return None
    steps = {size // share for size in choice.batches_to_come}
    return next((reason for number in sorted(steps) if (reason := _interleaved_batches(choice, number))), None)


def _interleaved_batches(choice: Choice, number: int) -> str | None:
    """Return why virtual stages cannot run a number of micro batches; None if they can."""
    pipeline = choice.layout.pipeline
    group = choice.microbatch_group
    batches = quantity(number, "micro batch", "micro batches")
    if group == pipeline and number % group:
        return f"with VPP, {batches} must be a multiple of PP {pipeline}"
    if not pipeline <= group <= number:
        limits = f"PP {pipeline} to {batches}"
        return f"with VPP, --microbatch-group-size-per-virtual-pipeline-stage {group} must be within {limits}"
    if 0 < number % group < pipeline:
        return f"with VPP, {batches} in groups of {group} leave fewer than PP {pipeline}"
    return None


NamedRule = tuple[str, Rule]
DENSE_RULES: tuple[NamedRule, ...] = (
    ("world size", _world_size),
    ("attention heads", _heads),
    ("query groups", _query_groups),
    ("linear attention heads", _linear_attention),
    ("Mamba heads", _mamba),
    ("sequence length", _sequence),
    ("context parallelism", _attention_of_context),
)
"""Rules that depend only on TP, PP and CP."""
EXPERT_RULES: tuple[NamedRule, ...] = (
    ("experts", check_experts),
    ("biases of experts", check_expert_biases),
    ("expert tensor parallelism", check_expert_tensor),
    ("expert world size", check_expert_world_size),
    ("rank order", _rank_order),
    ("optimizer instances", _optimizer_instances),
    ("parameter shapes", _parameters),
)
"""Rules that also depend on EP and ETP."""
BATCH_RULES: tuple[NamedRule, ...] = (("batch sizes", _micro_batches),)
"""Rules that depend on the batch."""
STAGE_RULES: tuple[NamedRule, ...] = (
    ("hybrid pattern", _hybrid_stages),
    ("layers per stage", _layers),
    ("shared indexers", _shared_indexers),
    ("tied predictions", _tied_predictions),
    ("interleaved schedule", _interleaving),
    ("overlapped experts", check_overlapped_experts),
    ("options of the job", check_options),
    *BATCH_RULES,
    ("evaluation batch", check_evaluation),
)
"""Rules that depend on virtual stages, the division of the layers, and the batch."""
RULES = (*DENSE_RULES, *EXPERT_RULES, *STAGE_RULES)
"""All rules with their names."""


def violations(choice: Choice, rules: Iterable[NamedRule] = RULES) -> Iterator[tuple[str, str]]:
    """Yield the rules that a choice violates in their order, as (name of the rule, reason)."""
    for name, rule in rules:
        if (reason := rule(choice)) is not None:
            yield name, reason
