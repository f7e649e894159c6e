"""The differences between releases of Megatron Core, one row each; no other module compares versions.

A row has the first release that does something, and the first release that no longer does it. If the version of a job
is not recorded, an argument that all releases have from a certain one on shows it. The last rows are about PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from mcore_ckpt_ext.versions import KNOWN, NEWEST, OLDEST, Version


class Arguments(Protocol):
    """The arguments of a job."""

    def absent_in_version(self, name: str) -> bool:
        """Return whether an argument did not exist in the version of the job."""


Span: TypeAlias = "tuple[Version | None, Version | None]"
"""The first and the last release of a range; None if it has no such end."""


def _before(version: Version) -> Version:
    return Version(version.major, version.minor - 1)


@dataclass(frozen=True, slots=True)
class Capability:
    """A behavior that only some releases have.

    Attributes:
        what: the behavior, as the end of a sentence that begins with "Megatron" or "PyTorch".
        source: where it was read in the source of Megatron-LM or PyTorch.
        since: the first release with this behavior; None if the oldest release has it.
        until: the first release without this behavior; None if the newest release has it.
        shown_by: an argument that jobs have from release `since` on, or from release `until` on.
    """

    what: str
    source: str
    since: Version | None = None
    until: Version | None = None
    shown_by: str | None = None

    def is_of(self, version: tuple[int, int]) -> bool:
        """Return whether a release has this behavior."""
        begun = self.since is None or version >= self.since
        return begun and (self.until is None or version < self.until)

    @property
    def span(self) -> Span:
        """The first and the last release with this behavior."""
        return self.since, _before(self.until) if self.until else None

    @property
    def span_without(self) -> Span:
        """The first and the last release without this behavior.

        Raises:
            ValueError: there are such releases both before and after those with this behavior.
        """
        if self.since and self.until:
            raise ValueError(f"releases before and after others do not do what Megatron {self.what}")
        return self.until, _before(self.since) if self.since else None

    def is_shown_by(self, arguments: Arguments) -> bool:
        """Return whether a job's release has this behavior, by its arguments.

        If the arguments are incomplete, the newest release is assumed.

        Raises:
            ValueError: no argument shows this behavior.
        """
        if self.shown_by is None or (self.since is None) == (self.until is None):
            raise ValueError(f"no argument shows whether Megatron {self.what}")
        return arguments.absent_in_version(self.shown_by) == (self.since is None)


def splits_layer_wise(version: tuple[int, int]) -> bool:
    """Return whether Megatron's scripts add a DistributedOptimizer to a layer-wise optimizer by default."""
    return MAY_SPLIT_LAYER_WISE.is_of(version) and not KEEPS_LAYER_WISE_WHOLE.is_of(version)


def releases_between(first: Version, last: Version = NEWEST) -> list[Version]:
    """Return the known releases from `first` to `last`, both included; empty if `last` precedes `first`."""
    return [version for version in KNOWN if first <= version <= last]


FIRST_ARGUMENTS = (
    "tiktoken_pattern", "decoder_first_pipeline_num_layers", "num_distributed_optimizer_instances",
    "use_precision_aware_optimizer", "ddp_num_buckets", "pipeline_model_parallel_layout", "use_megatron_fsdp",
    "quick_geglu", "linear_attention_freq", "dist_ckpt_workers", "cuda_graph_modules", "dsa_indexer_topk_freq",
)  # fmt: skip
"""For each known release except the oldest, an argument that it introduced and every later one has.

Compared in megatron/training/arguments.py of every release, and in the parsers of 0.16.1, 0.17.1, 0.18.2 and 0.19.2,
which also have the fields of megatron/training/config; a fork may have adopted one earlier.
"""


def releases_by_arguments(arguments: Arguments) -> tuple[tuple[Version, str] | None, tuple[Version, str] | None]:
    """Return a job's oldest and newest release by its arguments, each with the argument that shows it.

    Returns:
        The oldest and the newest possible release; None for each that no argument shows.
    """
    lacking = [arguments.absent_in_version(name) for name in FIRST_ARGUMENTS]
    newest = max((place for place, lacks in enumerate(lacking) if not lacks), default=-1)
    first = (KNOWN[newest + 1], FIRST_ARGUMENTS[newest]) if newest >= 0 else None
    last = (KNOWN[newest + 1], FIRST_ARGUMENTS[newest + 1]) if newest + 1 < len(lacking) else None
    return first, last


HAS_KNOWN_FORMATS = Capability(
    "has formats that are known here, or that are likely to follow them",
    "megatron/core/dist_checkpointing and megatron/training/checkpointing.py",
    since=OLDEST,
    until=Version(NEWEST.major + 1, 0),
)
ALIGNS_PARAMETERS = Capability(
    "aligns parameters in gradient buffers",
    "megatron/core/distributed/param_and_grad_buffer.py, commit 5467bef3",
    since=Version(0, 8),
    shown_by="dist_ckpt_strictness",
)
EXPERT_RANKS_RUN_SLOWEST = Capability(
    "numbers expert ranks after pipeline ranks in an optimizer's groups",
    "megatron/core/parallel_state.py; expert tensor parallelism, which came in 0.10, changed it",
    until=Version(0, 10),
    shown_by="expert_tensor_parallel_size",
)
KEEPS_DOWN_PROJECTIONS_WHOLE = Capability(
    "keeps the down projections of latent attention whole on every tensor-parallel rank",
    "megatron/core/models/gpt/gpt_layer_specs.py, `linear()` of the Transformer Engine spec",
    since=Version(0, 14),
)
FINAL_NORM_FOLLOWS_LAST_LAYER = Capability(
    "puts the final norm of a model that predicts further tokens behind its last decoder layer",
    "megatron/core/transformer/transformer_block.py, `has_final_layernorm_in_this_stage`",
    since=Version(0, 16),
    shown_by="linear_attention_freq",
)
FILTERS_ARE_FIRST = Capability(
    "registers the filter of a Mamba mixer as its own parameter, before what is in it",
    "megatron/core/ssm/mamba_mixer.py, `MambaMixer`",
    since=Version(0, 19),
    shown_by="gtp_weight_remat_size",
)
LOADS_DP_RESHARDABLE = Capability(
    "loads the optimizer format dp_reshardable",
    "megatron/core/optimizer/distrib_optimizer.py, `load_state_dict`",
    since=Version(0, 15),
)
LOADS_FULLY_RESHARDABLE = Capability(
    "loads the optimizer format fully_reshardable",
    "megatron/core/optimizer/distrib_optimizer.py, `load_state_dict`",
    since=Version(0, 15),
)
LOADS_BUCKET_SPACE = Capability(
    "loads the optimizer format fully_sharded_bucket_space",
    "megatron/core/optimizer/distrib_optimizer.py, `load_state_dict`",
    until=Version(0, 13),
)
LOADS_MODEL_SPACE = Capability(
    "loads the optimizer format fully_sharded_model_space with each group's own settings",
    "megatron/core/optimizer/distrib_optimizer.py; refused since commit 5ab481cb",
    since=Version(0, 14),
    until=Version(0, 16),
)
LOADS_FSDP_DTENSOR = Capability(
    "loads the checkpoint format fsdp_dtensor",
    "megatron/training/checkpointing.py, `load_checkpoint`",
    since=Version(0, 14),
)
MATCHES_GROUPS_BY_SETTINGS = Capability(
    "matches the parameter groups of a checkpoint by their settings, and not by their position",
    "megatron/core/optimizer/distrib_optimizer.py, `make_needed_groups`",
    since=Version(0, 14),
)
MATCHES_GROUPS_BY_BOUNDS = Capability(
    "matches the parameter groups of a checkpoint by the bounds of their learning rates, too",
    "megatron/core/optimizer/optimizer.py, `param_group_identifier_keys`",
    since=Version(0, 19),
)
OVERRIDES_BOUNDS_OF_GROUPS = Capability(
    "gives every parameter group the arguments' bounds under --override-opt_param-scheduler",
    "megatron/training/checkpointing.py, `load_checkpoint`, the head of August 2026",
    since=Version(0, 20),
)
CLOSES_BUCKETS_AT_ALIGNED_ENDS = Capability(
    "starts a parameter of the shared embedding at the padded end of the bucket before it",
    "megatron/core/distributed/param_and_grad_buffer.py, commit afb755f5",
    since=Version(0, 13),
)
STORES_COMMON_STATE_AS_OBJECT = Capability(
    "stores the common state as an object of the index, and names no common backend",
    "megatron/core/dist_checkpointing/serialization.py and core.py",
    since=Version(0, 19),
)
EXTENDS_INDEX_WITH_SHAPES = Capability(
    "extends the index with natural shapes (`mcore_data`)",
    "megatron/core/dist_checkpointing/strategies/torch.py",
    since=Version(0, 8),
    until=Version(0, 16),
)
KEEPS_PLANS_IN_INDEX = Capability(
    "keeps the plans of all ranks in the index",
    "megatron/core/dist_checkpointing/strategies/state_dict_saver.py, `save_state_dict_async_plan`",
    since=Version(0, 11),
)
WRITES_ZARR = Capability(
    "writes checkpoints in the format zarr",
    "megatron/training/checkpointing.py, `save_checkpoint`",
    until=Version(0, 12),
)
LOADS_ZARR = Capability(
    "loads checkpoints in the format zarr", "megatron/core/dist_checkpointing/strategies/zarr.py", until=Version(0, 16)
)
HAS_TORCH_DCP = Capability(
    "has the checkpoint format torch_dcp, that of --use-torch-fsdp2",
    "megatron/training/checkpointing.py",
    since=Version(0, 12),
)
RESHAPES_STATE = Capability(
    "stores optimizer arrays of a natural shape reshaped",
    "megatron/core/dist_checkpointing/strategies/torch.py and resharding.py",
    until=Version(0, 15),
)
RESHAPES_STATE_OF_ONE_AXIS = Capability(
    "stores those of one axis reshaped, too",
    "megatron/core/dist_checkpointing/strategies/resharding.py",
    since=Version(0, 11),
    until=Version(0, 15),
)
MARKS_CHAINED_KEYS = Capability(
    "marks the keys of chained optimizers",
    "megatron/core/optimizer/optimizer.py, `ChainedOptimizer.sharded_state_dict`",
    until=Version(0, 14),
)
STORES_FULLY_RESHARDABLE = Capability(
    "stores optimizers that any layout loads as fully_reshardable, their masters under `param`",
    "megatron/core/optimizer/distrib_optimizer.py, `sharded_state_dict`",
    since=Version(0, 15),
)
DESCRIBES_CONTENT = Capability(
    "keeps content_metadata in the common state",
    "megatron/training/checkpointing.py, `_build_sharded_state_dict_metadata`",
    since=Version(0, 13),
)
DESCRIBES_LOCAL_SHARDS = Capability(
    "describes in content_metadata whether local shards are apart (`singleton_local_shards`)",
    "megatron/training/checkpointing.py, `_build_sharded_state_dict_metadata`",
    since=Version(0, 14),
)
GRID_OF_EXPERTS_HAS_DATA_RANKS = Capability(
    "gives the grid of random states a data-parallel axis where there are several expert ranks",
    "megatron/training/checkpointing.py, `get_rng_state`",
    since=Version(0, 16),
    until=Version(0, 17),
)
STARTS_RANDOM_STATES_ANEW = Capability(
    "requests no random state where pipeline or tensor parallelism has changed",
    "megatron/training/checkpointing.py, `load_checkpoint`",
    since=Version(0, 14),
)
TAKES_STEPS_OF_PRECISION_AWARE = Capability(
    "takes the step of a precision-aware optimizer for a tensor only where it is one",
    "megatron/core/optimizer/distrib_optimizer.py, `_set_main_param_and_optimizer_states`",
    since=Version(0, 17),
)
MAY_SPLIT_LAYER_WISE = Capability(
    "may have a DistributedOptimizer in addition to a layer-wise one, unless --no-use-layer-wise-param-layout is given",
    "megatron/core/optimizer/__init__.py, `_get_megatron_emerging_optimizer`; megatron/training/training.py (0.18.2)",
    since=Version(0, 18),
)
KEEPS_LAYER_WISE_WHOLE = Capability(
    "has a layer-wise optimizer alone where the model is built from a configuration, as by its own scripts",
    "megatron/training/training.py, `get_model` (0.19.1, 0.19.2)",
    since=Version(0, 19),
    until=Version(0, 20),
)
PACKS_LAYER_WISE_BY_COMPUTATION = Capability(
    "shares the matrices of a layer-wise optimizer out by the time that their steps take",
    "megatron/core/optimizer/layer_wise_optimizer.py, `_compute_per_buffer_param_layout`, the head of August 2026",
    since=Version(0, 20),
)
SEPARATES_DIVIDED_EXPERTS = Capability("reduces divided experts apart", "tensor_parallel/layers.py", Version(0, 19))
SHARES_QUERY_GROUPS = Capability(
    "lets several tensor-parallel ranks share a query group",
    "megatron/core/transformer/transformer_config.py, `TransformerConfig.__post_init__`",
    since=Version(0, 16),
)
TAKES_STAGE_LAYOUTS = Capability(
    "takes --pipeline-model-parallel-layout",
    "megatron/training/arguments.py",
    since=Version(0, 13),
    shown_by="pipeline_model_parallel_layout",
)
CHOOSES_CHECKPOINT_FORMATS = Capability(
    "takes --ckpt-format torch, with which a job loads legacy files",
    "megatron/training/arguments.py",
    since=Version(0, 9),
)
LOADS_PORTABLE_OPTIMIZERS = Capability(
    "has an optimizer format in torch_dist that it resumes under any layout",
    "megatron/core/optimizer/distrib_optimizer.py, `sharded_state_dict`",
    since=Version(0, 8),
)
NEEDS_PERSISTENT_WORKER = Capability(
    "switches --async-save off, unless --use-persistent-ckpt-worker is given",
    "megatron/training/arguments.py, `validate_args`, line 1138 of core_v0.16.1 and 1740 of 0.19.2",
    since=Version(0, 16),
)
FREEZES_WHOLE_JOBS = Capability(
    "neither loads an optimizer nor saves weights under --freeze-all-layers",
    "megatron/training/checkpointing.py, `save_checkpoint` and `load_checkpoint`, the head of August 2026",
    since=Version(0, 20),
)
PASSES_ON_INTERPOLATION = Capability(
    "passes --rotary-seq-len-interpolation-factor on to its model",
    "megatron/training/argument_utils.py, `gpt_config_from_args`; not gpt_builders.py of 0.16 to 0.18",
    since=Version(0, 19),
    shown_by="gtp_weight_remat_size",
)
NORMALIZES_PLAIN_QUERIES = Capability(
    "fuses a norm into linear_q_proj, which a model without compressed queries does not have",
    "megatron/core/transformer/mla_qk_norm_config.py, `_resolve_mla_qk_layernorm`, 0.19.0 to 0.19.2",
    since=Version(0, 19),
    until=Version(0, 20),
)
AVERAGES_BY_CONTEXT_RANK = Capability("averages losses by context rank", "Megatron-LM/pretrain_gpt.py", Version(0, 13))
WEIGHS_FURTHER_TOKENS = Capability("weighs further tokens", "transformer/multi_token_prediction.py", Version(0, 17))
SCALES_BALANCE_BY_BATCH = Capability("scales balance by micro batch", "moe/router.py", Version(0, 16), Version(0, 19))
SCALES_BALANCE_BY_RANK = Capability("scales balance by rank", "moe/router.py", Version(0, 12), Version(0, 19))
CHECKS_EVALUATION = Capability("checks the batch of evaluation", "megatron/training/arguments.py", Version(0, 18))
RAMPS_UP_BATCH = Capability("ramps up", "core/num_microbatches_*.py", None, Version(0, 18), "step_batch_size_schedule")
RESUMES_WITH_THIS_PACKAGE = Capability(
    "has a `load_checkpoint` in which this package is tested",
    "megatron/training/checkpointing.py, 0.16.1 to 0.19.2; docs/reference/loops.md",
    since=Version(0, 16),
)
TORCH_IS_SUPPORTED = Capability("is recent enough", "torch/distributed/checkpoint; `dependencies`", Version(2, 4))
TORCH_LOADS_PLUGINS = Capability(
    "loads plugins at the end of its import",
    "torch/__init__.py, `_is_device_backend_autoload_enabled`",
    since=Version(2, 5),
)
