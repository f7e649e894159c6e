"""Defines a model family: its mapping of Hugging Face's tensors and configuration to Megatron's.

The rows of a Hugging Face tensor are consecutive regions of Megatron's parameters. This mapping serves both directions:
writing a Hugging Face folder, and reading one.

A model that is Llama but for biases of its query, key and value projections, in a file parrot.py, is read and written
by `mcore-ckpt convert ... --family parrot.py:Parrot`:

    from mcore_ckpt_ext.families import parts
    from mcore_ckpt_ext.families.common_settings import llama_like
    from mcore_ckpt_ext.families.family import Family
    from mcore_ckpt_ext.families.settings import Requires


    class Parrot(Family):
        model_type = "parrot"  # of config.json
        architecture = "ParrotForCausalLM"
        rules = (*parts.DECODER, *parts.attention("bias"))
        settings = (*llama_like(), Requires({"add_bias_linear": False, "add_qkv_bias": True}))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, join_some, quantity, shorten
from mcore_ckpt_ext.families.config_checks import Config
from mcore_ckpt_ext.families.config_keys import (
    ABOUT_OTHER_FILES,
    MOST_LISTED,
    OF_THE_FILE,
    WITHOUT_EFFECT,
    NeutralKeys,
    default_sizes,
    neutral_keys,
)
from mcore_ckpt_ext.families.forward_pass import SIZES, unexpressed_arguments
from mcore_ckpt_ext.families.parameter_shapes import parameter_shape
from mcore_ckpt_ext.families.rules import (
    Condition,
    HuggingFaceTensor,
    Piece,
    Rule,
    always,
    dense,
    name_pattern,
    names_matching,
    parameter_shapes,
    rule_places,
    rule_tensors,
    set_in,
    untied,
    with_experts,
)
from mcore_ckpt_ext.families.settings import Setting
from mcore_ckpt_ext.families.validation import check_plain
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import ModelArguments, complete
from mcore_ckpt_ext.model_space.anatomy import OUTPUT_LAYER, WORD_EMBEDDINGS
from mcore_ckpt_ext.settings import ACCEPT_KEYS

__all__ = [
    "Condition",
    "Family",
    "HuggingFaceTensor",
    "Piece",
    "Rule",
    "always",
    "dense",
    "names_matching",
    "parameter_shapes",
    "set_in",
    "untied",
    "with_experts",
]

_SHOWN = 40
_MOST_ACCEPTED = 6
_OUTPUT_LAYER = "lm_head.weight"


class Family:
    """A model family. A subclass sets the attributes, and overrides methods for special cases.

    Attributes:
        model_type: `model_type` in `config.json`.
        architecture: class of transformers.
        alternative_architecture: another class in `config.json` of this family.
        contained_in: a family that covers all models of this one, and is preferred unless the user names this one.
        rules: rules for all tensors, in the order of transformers' `state_dict`.
        repeated: rules for tensors that repeat others: written, and only compared when read.
        read_rules: rules for other forms of the same tensors in published folders; never written.
        settings: mapping between the two configurations.
        left_out: patterns of Hugging Face tensors that Megatron does not have; they are reported, not converted.
        megatron_left_out: patterns of Megatron's tensors that Hugging Face folders do not have.
        without_effect: keys of `config.json` without effect on the model, in addition to those of all families.
        bridge_only_reason: reason why only Megatron-Bridge can build the model; empty if Megatron Core's `GPTModel`
            can.
        needs_engine: Megatron can only build it with Transformer Engine's layer spec.
        defaults: defaults of the transformers class for sizes that published folders omit.
        bridge_provider: class of the family in Megatron-Bridge, below `megatron.bridge.models`, if it has its own.
        bridge_lacks: fields of the default class that `bridge_provider` does not have.
        origin: installed distribution that registers the family; empty for families of this package.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    alternative_architecture: ClassVar[str | None] = None
    contained_in: ClassVar[str] = ""
    rules: ClassVar[Sequence[Rule]]
    settings: ClassVar[Sequence[Setting]]
    repeated: ClassVar[Sequence[Rule]] = ()
    read_rules: ClassVar[Sequence[Rule]] = ()
    left_out: ClassVar[Sequence[str]] = (r"\.rotary_emb\.inv_freq$",)
    megatron_left_out: ClassVar[Sequence[str]] = (r"^mtp\.", r"\.local_tokens_per_expert$")
    without_effect: ClassVar[Sequence[str]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    bridge_only_reason: ClassVar[str] = ""
    needs_engine: ClassVar[bool] = False
    bridge_provider: ClassVar[str] = ""
    bridge_lacks: ClassVar[Sequence[str]] = ()
    origin: str = ""

    @property
    def name(self) -> str:
        """The name of the family, for messages and `--family`."""
        return type(self).__name__

    @property
    def described(self) -> str:
        """The name of the family, with its distribution if it is not of this package."""
        return f"{self.name} (registered by {self.origin})" if self.origin else self.name

    def config(self, arguments: ModelArguments) -> dict[str, Any]:
        """Return the `config.json` for a model's arguments, with `vocab_size` without padding."""
        config: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for setting in self.settings:
            config |= setting.config(arguments)
        return config

    def arguments(self, config: Config, neutral: NeutralKeys | None = None) -> ModelArguments:
        """Return a model's arguments for a `config.json`.

        Args:
            config: configuration of the model, or of its language model.
            neutral: keys without effect; by default those for the `model_type` of `config`.

        Raises:
            UnsupportedCheckpointError: a key is missing, unknown, or has a value that Megatron cannot express.
        """
        self._check_keys(config, neutral or neutral_keys(config, str(config.get("model_type"))))
        return self.mapped_arguments(config)

    def mapped_arguments(self, config: Config) -> ModelArguments:
        """Return a model's arguments for a `config.json`, ignoring unknown keys.

        Raises:
            UnsupportedCheckpointError: a key is missing, or has a value that Megatron cannot express.
        """
        config = {**default_sizes(str(config.get("model_type"))), **self.defaults, **config}
        arguments: dict[str, Any] = {}
        try:
            for setting in self.settings:
                arguments |= setting.arguments(config)
            check_plain(arguments)
            experts = arguments.get("num_experts")
            chosen = arguments.get("moe_router_topk")
            if experts and chosen and chosen > experts:
                raise ValueError(f"{quantity(chosen, 'expert')} for each token, of {experts}")
            by_softmax = arguments.get("moe_router_score_function", "softmax") == "softmax"
            if experts and chosen == 1 and by_softmax and not arguments.get("moe_router_pre_softmax"):
                raise ValueError("one expert per token with a gate normalized to 1, which Megatron does not have")
            return complete(JobArguments.of(arguments, source="config.json"))
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise UnsupportedCheckpointError(
                "config.json lacks a key, or one has an invalid value", found=str(error), where="config.json"
            ) from error

    @property
    def mapped_keys(self) -> frozenset[str]:
        """The keys of `config.json` that settings map, and those without effect in all models of the family."""
        explained = (key for setting in self.settings for key in setting.keys)
        return WITHOUT_EFFECT.union(explained, self.without_effect)

    @property
    def expressed(self) -> frozenset[str]:
        """The arguments that the settings map, and those that all families map."""
        return SIZES.union(*(setting.expresses for setting in self.settings))

    def _check_keys(self, config: Config, neutral: NeutralKeys) -> None:
        known_keys = self.mapped_keys | neutral.names
        # A null key has no effect.
        strange = sorted(key for key, value in config.items() if key not in known_keys and value is not None)
        if not strange:
            return
        listed = join_some([f"{key}: {shorten(repr(config[key]), _SHOWN)}" for key in strange], MOST_LISTED)
        several = len(strange) > _MOST_ACCEPTED
        accept = "--accept-key KEY for each" if several else " ".join(f"--accept-key {key}" for key in strange)
        raise UnsupportedCheckpointError(
            f"config.json has keys unknown for {self.name} that may change what the model computes",
            found=listed + (f" ({neutral.strict})" if neutral.strict else ""),
            where="config.json",
            hint=f"if they do not: {accept} (in a job: {ACCEPT_KEYS.flag}); to map them, a family of your own "
            "(python -m pydoc mcore_ckpt_ext.families.family): --family path.py:Name",
        )

    def updated_config(self, published: Config, arguments: ModelArguments) -> dict[str, Any] | None:
        """Return a published `config.json` with only those keys changed that a job changed.

        Keys that may affect the model and that no setting maps are not copied: the file may belong to a tokenizer of
        another model. MTP layers that the job lacks are not a change, because published folders also count layers that
        they do not contain.

        Returns:
            None if the published file cannot be changed to describe the job's model.
        """
        expected = self.config(arguments)
        neutral = neutral_keys(published, str(published.get("model_type")), written=True)
        carried = (self.mapped_keys | neutral.names) - ABOUT_OTHER_FILES
        try:
            before = _with_mtp_of(arguments, self.mapped_arguments(published))
            updated = {key: value for key, value in published.items() if key in carried or value is None}
            for setting in self.settings:
                if (new := setting.config(arguments)) != setting.config(before):
                    updated = {key: value for key, value in updated.items() if key not in setting.keys} | new
            as_written = self.config(_with_mtp_of(arguments, self.mapped_arguments(updated)))
        except UnsupportedCheckpointError:
            return None
        return updated if as_written == expected else None

    def copied_keys(self, config: Config) -> dict[str, Any]:
        """Return the copied keys of a `config.json`: those without effect, except those about the file."""
        kept = WITHOUT_EFFECT.union(self.without_effect) - OF_THE_FILE
        return {key: value for key, value in config.items() if key in kept}

    def mismatches(self, arguments: ModelArguments) -> list[str]:
        """Return the reasons why a job with these arguments does not train a model of this family."""
        reasons = [reason for setting in self.settings for reason in setting.mismatches(arguments)]
        return reasons + unexpressed_arguments(self.expressed, arguments)

    def prefer_other_family(self, arguments: ModelArguments) -> list[str]:
        """Return the reasons to prefer another family for a matching model, unless the user names this one."""
        return [f"all that {self.contained_in} is"] if self.contained_in else []

    @property
    def embedding(self) -> str:
        """The Hugging Face tensor with the embeddings of tokens."""
        return self._tensor_of(WORD_EMBEDDINGS)

    @property
    def output_layer(self) -> str:
        """The Hugging Face tensor with the weight of the output layer, in tied models a copy of `embedding`."""
        return self._tensor_of(OUTPUT_LAYER) or _OUTPUT_LAYER

    def _tensor_of(self, parameter: str) -> str:
        return next((rule.hugging_face for rule in self.rules if rule.megatron == parameter), "")

    def with_prefixes(self, names: Collection[str]) -> dict[str, str]:
        """Return the names in a model with a head for the names in a folder, which may lack their first part.

        transformers loads a folder of a model without a head, like `LlamaModel`, into one with a head, whose other
        tensors have the first part of their names in common (`base_model_prefix` of modeling_utils.py, 4.36 to 5.23).
        """
        prefix, _, rest = self.embedding.partition(".")
        if rest not in names:
            return {name: name for name in names}
        beside = {rule.hugging_face.partition(".")[0] for rule in (*self.rules, *self.read_rules)}
        return {name: name if name.partition(".")[0] in beside else f"{prefix}.{name}" for name in names}

    def unmapped_tensors(self, names: Collection[str], arguments: ModelArguments, config: Config) -> set[str]:
        """Return the tensors of a folder that Megatron does not have; they are reported, not converted."""
        tied = set() if arguments.untie_embeddings_and_output_weights else {self.output_layer}
        return set(names_matching(names, self.left_out)) | (tied & set(names))

    def __repr__(self) -> str:
        """Return the same text in every process: an interrupted conversion is recognized by its options."""
        return f"{type(self).__module__}:{self.name}"

    def notices(self, arguments: ModelArguments) -> list[str]:
        """Return notices for users of models with these arguments."""
        return []

    def bridge_fields(self, arguments: ModelArguments) -> dict[str, Any]:
        """Return the fields that only the family's own class in Megatron-Bridge has."""
        return {}

    def shape(self, name: str, arguments: ModelArguments) -> tuple[int, ...]:
        """Return the shape of a Megatron parameter without vocabulary padding; `name` as in the rules."""
        return parameter_shape(name, arguments)

    def tensors(self, arguments: ModelArguments, present: Collection[str] | None = None) -> list[HuggingFaceTensor]:
        """Return all tensors of a model.

        Args:
            arguments: arguments of the model, with `vocab_size` without padding.
            present: names of tensors in the folder to be read, which select between `rules` and `read_rules`.
        """
        return self._tensors_of(self._rules_for(present or ()), arguments)

    def copies(self, arguments: ModelArguments) -> list[HuggingFaceTensor]:
        """Return the tensors that a folder may repeat, with the regions of the originals."""
        return self._tensors_of(self.repeated, arguments)

    def _tensors_of(self, rules: Sequence[Rule], arguments: ModelArguments) -> list[HuggingFaceTensor]:
        return [
            tensor
            for rule in rules
            for layer, places in rule_places(rule, arguments)
            if rule.where(arguments, layer)
            for tensor in rule_tensors(rule, places, arguments, self.shape)
        ]

    def mtp_layers(self, names: Collection[str], arguments: ModelArguments) -> int:
        """Return the number of multi-token prediction (MTP) layers in a folder."""
        return 0

    def _rules_for(self, present: Collection[str]) -> list[Rule]:
        patterns = {rule: name_pattern(rule.hugging_face) for rule in self.read_rules}
        first = [rule for rule, pattern in patterns.items() if any(map(pattern.fullmatch, present))]
        replaced = {rule.megatron for rule in first}
        return [rule for rule in self.rules if rule.megatron not in replaced] + first


def _with_mtp_of(job: ModelArguments, described: ModelArguments) -> ModelArguments:
    """Return a described model without MTP layers if the job has none."""
    return described if job.mtp_num_layers else described.replace(mtp_num_layers=None)
