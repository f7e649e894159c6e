"""Defines a model family: how tensors of Hugging Face map to Megatron's rows, and how the configurations match.

A Hugging Face tensor, read row by row, consists of regions of Megatron's parameters, one after the other. This one
sentence serves both directions: it says what a file to be written wants, and what an existing file holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, shorten
from mcore_ckpt_ext.families.config_keys import (
    ABOUT_OTHER_FILES,
    OF_THE_FILE,
    WITHOUT_EFFECT,
    NeutralKeys,
    neutral_keys,
)
from mcore_ckpt_ext.families.forward_pass import SIZES, unexpressed
from mcore_ckpt_ext.families.parameter_shapes import parameter_shape
from mcore_ckpt_ext.families.rules import (
    Condition,
    HuggingFaceTensor,
    Piece,
    Rule,
    always,
    dense,
    matching,
    name_pattern,
    parameter_shapes,
    rule_places,
    rule_tensor,
    rule_tensors,
    set_in,
    untied,
    with_experts,
)
from mcore_ckpt_ext.families.settings import Config, Setting
from mcore_ckpt_ext.families.validation import check_plain
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import ModelArguments, complete
from mcore_ckpt_ext.settings import ACCEPT_KEYS

__all__ = [
    "Condition", "Family", "HuggingFaceTensor", "Piece", "Rule", "always", "dense", "matching", "parameter_shapes",
    "set_in", "untied", "with_experts",
]  # fmt: skip

_SHOWN, _MOST_SHOWN = 40, 6


class Family:
    """One model family. A new one states the attributes, and overrides methods for what attributes cannot say.

    Attributes:
        model_type: as in `config.json`.
        architecture: the class of transformers.
        alternative_architecture: another class that folders of this family may name.
        rules: for all tensors, in the order of transformers' `state_dict`.
        repeated: for tensors that repeat others: written, but not read, once they are found to be copies.
        read_rules: other forms of the same tensors that folders in the wild have; never written.
        settings: for everything that both configurations say.
        left_out: patterns of Hugging Face tensors that have no place in Megatron; they are reported, not converted.
        megatron_left_out: patterns of Megatron's tensors that have no place in a Hugging Face folder.
        without_effect: keys of `config.json`, beside those of every family, that say nothing about what it computes.
        optional_prefix: a beginning that names in folders in the wild may lack.
        bridge_only_reason: why Megatron-Bridge alone can build the model; empty where Megatron Core's `GPTModel` can.
        needs_engine: Megatron builds it of Transformer Engine's layers only.
        defaults: what the class of transformers has for sizes that released folders leave out.
        bridge_provider: the family's own class in Megatron-Bridge, below `megatron.bridge.models`, if it needs one.
        bridge_lacks: fields of the usual class that this one does not have.
        origin: the installed distribution that registers it; empty for this package's own.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    alternative_architecture: ClassVar[str | None] = None
    rules: ClassVar[Sequence[Rule]]
    settings: ClassVar[Sequence[Setting]]
    repeated: ClassVar[Sequence[Rule]] = ()
    read_rules: ClassVar[Sequence[Rule]] = ()
    left_out: ClassVar[Sequence[str]] = (r"\.rotary_emb\.inv_freq$",)
    megatron_left_out: ClassVar[Sequence[str]] = (r"^mtp\.", r"\.local_tokens_per_expert$")
    without_effect: ClassVar[Sequence[str]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    optional_prefix: ClassVar[str] = ""
    bridge_only_reason: ClassVar[str] = ""
    needs_engine: ClassVar[bool] = False
    bridge_provider: ClassVar[str] = ""
    bridge_lacks: ClassVar[Sequence[str]] = ()
    origin: str = ""

    @property
    def name(self) -> str:
        """For messages and `--family`."""
        return type(self).__name__

    @property
    def described(self) -> str:
        """The name, and where the family comes from if not from this package."""
        return f"{self.name} (registered by {self.origin})" if self.origin else self.name

    def config(self, arguments: ModelArguments) -> dict[str, Any]:
        """`config.json` for a job's arguments, completed and with the true `vocab_size`."""
        found: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for setting in self.settings:
            found |= setting.config(arguments)
        return found

    def arguments(self, config: Config, neutral: NeutralKeys | None = None) -> ModelArguments:
        """A job's arguments for a `config.json`.

        Args:
            config: of the model, or of its text.
            neutral: the keys without effect; by default those for the `model_type` of `config`.

        Raises:
            UnsupportedCheckpointError: a key is missing, is not known, or says what Megatron cannot do.
        """
        self._check_keys(config, neutral or neutral_keys(config, str(config.get("model_type"))))
        return self.mapped_arguments(config)

    def mapped_arguments(self, config: Config) -> ModelArguments:
        """A job's arguments for a `config.json`, whatever other keys it has.

        Raises:
            UnsupportedCheckpointError: a key is missing, or says what Megatron cannot do.
        """
        config = {**self.defaults, **config}
        found: dict[str, Any] = {}
        try:
            for setting in self.settings:
                found |= setting.arguments(config)
            check_plain(found)
            experts, chosen = found.get("num_experts"), found.get("moe_router_topk")
            if experts and chosen and chosen > experts:
                raise ValueError(f"{chosen} experts for each token, of {experts}")
            by_softmax = found.get("moe_router_score_function", "softmax") == "softmax"
            if experts and chosen == 1 and by_softmax and not found.get("moe_router_pre_softmax"):
                raise ValueError("one expert per token with a gate normalized to 1, which Megatron does not have")
            return complete(JobArguments.of(found, source="config.json"))
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise UnsupportedCheckpointError(
                "config.json lacks a key, or one has an invalid value", found=str(error), where="config.json"
            ) from error

    @property
    def mapped_keys(self) -> frozenset[str]:
        """The keys of `config.json` that its settings explain, and those without effect in all its models."""
        explained = (key for setting in self.settings for key in setting.keys)
        return WITHOUT_EFFECT.union(explained, self.without_effect)

    @property
    def expressed(self) -> frozenset[str]:
        """The arguments of which its settings take account, and those of all families."""
        return SIZES.union(*(setting.expresses for setting in self.settings))

    def _check_keys(self, config: Config, neutral: NeutralKeys) -> None:
        known = self.mapped_keys | neutral.names
        # A key without a value asks for nothing.
        strange = sorted(key for key, value in config.items() if key not in known and value is not None)
        if not strange:
            return
        shown = ", ".join(f"{key}: {shorten(repr(config[key]), _SHOWN)}" for key in strange[:_MOST_SHOWN])
        more = f", and {len(strange) - _MOST_SHOWN} more" if len(strange) > _MOST_SHOWN else ""
        accept = " ".join(f"--accept-key {key}" for key in strange[:_MOST_SHOWN])
        raise UnsupportedCheckpointError(
            f"config.json has keys unknown for {self.name} that may change what the model computes",
            found=shown + more + (f" ({neutral.strict})" if neutral.strict else ""), where="config.json",
            hint=f"if they do not: {accept} (in a job: {ACCEPT_KEYS.flag}); to map them, a family of your own "
            "(docs/how-to/own-format.md): --family path.py:Name",
        )  # fmt: skip

    def updated_config(self, published: Config, arguments: ModelArguments) -> dict[str, Any] | None:
        """A published `config.json` with the keys changed that a job changed, and all others as they are.

        Keys that may change what the model computes, and that no setting maps, are not taken over: the file may lie
        beside a tokenizer, and be of another model. MTP layers that the job does not have are no change: released
        folders, too, count some that they do not hold.

        Returns:
            None where it cannot be brought to describe the job's model.
        """
        wanted = self.config(arguments)
        neutral = neutral_keys(published, str(published.get("model_type")), written=True)
        carried = (self.mapped_keys | neutral.names) - ABOUT_OTHER_FILES
        try:
            before = _with_mtp_of(arguments, self.mapped_arguments(published))
            found = {key: value for key, value in published.items() if key in carried or value is None}
            for setting in self.settings:
                if (new := setting.config(arguments)) != setting.config(before):
                    found = {key: value for key, value in found.items() if key not in setting.keys} | new
            as_written = self.config(_with_mtp_of(arguments, self.mapped_arguments(found)))
        except UnsupportedCheckpointError:
            return None
        return found if as_written == wanted else None

    def kept(self, config: Config) -> dict[str, Any]:
        """What of a `config.json` another one takes over: the keys without effect, but for those of the file itself."""
        kept = WITHOUT_EFFECT.union(self.without_effect) - OF_THE_FILE
        return {key: value for key, value in config.items() if key in kept}

    def mismatches(self, arguments: ModelArguments) -> list[str]:
        """Why a job with these arguments does not train this family; empty where it does."""
        found = [reason for setting in self.settings for reason in setting.mismatches(arguments)]
        return found + unexpressed(self.expressed, arguments)

    def prefer_other_family(self, arguments: ModelArguments) -> list[str]:
        """Why a model that fits should bear another family's name, unless the user says otherwise."""
        return []

    def unmapped_tensors(self, names: Collection[str], arguments: ModelArguments, config: Config) -> set[str]:
        """Those of a folder's tensors that have no place in Megatron; they are reported, not converted."""
        tied = set() if arguments.untie_embeddings_and_output_weights else {"lm_head.weight"}
        return set(matching(names, self.left_out)) | (tied & set(names))

    def __repr__(self) -> str:
        """The same in every process, because an interrupted conversion is recognised by its options."""
        return f"{type(self).__module__}:{self.name}"

    def notices(self, arguments: ModelArguments) -> list[str]:
        """Notes for users of models with these arguments."""
        return []

    def bridge_fields(self, arguments: ModelArguments) -> dict[str, Any]:
        """Fields that only the family's own class in Megatron-Bridge has."""
        return {}

    def shape(self, name: str, arguments: ModelArguments) -> tuple[int, ...]:
        """The shape of one of Megatron's parameters, the vocabulary not padded; `name` as in the rules."""
        return parameter_shape(name, arguments)

    def tensors(self, arguments: ModelArguments, present: Collection[str] | None = None) -> list[HuggingFaceTensor]:
        """All tensors of a model.

        Args:
            arguments: of the job, completed, with the true `vocab_size`.
            present: names in the folder that is read, which decide between `rules` and `read_rules`.
        """
        found = []
        for rule in self._rules_for(present or ()):
            for layer, places in rule_places(rule, arguments):
                if rule.where(arguments, layer):
                    found += list(rule_tensors(rule, places, arguments, self.shape))
        return found

    def copies(self, arguments: ModelArguments) -> list[HuggingFaceTensor]:
        """Tensors that a folder may hold although they repeat others, under the regions of those."""
        return [
            rule_tensor(rule, places, arguments, self.shape)
            for rule in self.repeated
            for layer, places in rule_places(rule, arguments)
            if rule.where(arguments, layer)
        ]

    def mtp_layers(self, names: Collection[str], arguments: ModelArguments) -> int:
        """How many multi-token prediction (MTP) layers a folder holds, beside those of the decoder."""
        return 0

    def _rules_for(self, present: Collection[str]) -> list[Rule]:
        patterns = {rule: name_pattern(rule.hugging_face) for rule in self.read_rules}
        first = [rule for rule, pattern in patterns.items() if any(map(pattern.fullmatch, present))]
        replaced = {rule.megatron for rule in first}
        return [rule for rule in self.rules if rule.megatron not in replaced] + first


def _with_mtp_of(job: ModelArguments, described: ModelArguments) -> ModelArguments:
    """What `config.json` describes, without MTP layers where the job has none."""
    return described if job.mtp_num_layers else described.replace(mtp_num_layers=None)
