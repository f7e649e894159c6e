"""What a model family is: how Hugging Face's tensors are made of Megatron's rows, and how the two configurations match.

A Hugging Face tensor, read row by row, consists of regions of Megatron's parameters, one after the other. This one
sentence serves both directions: it says what a file to be written wants, and what an existing file holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, shortened
from mcore_ckpt_ext.families.config_keys import (
    ABOUT_OTHER_FILES,
    OF_THE_FILE,
    WITHOUT_EFFECT,
    NeutralKeys,
    neutral_keys,
)
from mcore_ckpt_ext.families.forward_pass import SIZES, unexpressed
from mcore_ckpt_ext.families.parameter_shapes import parameter_shape, spec_name
from mcore_ckpt_ext.families.rows import WHOLE, Rows
from mcore_ckpt_ext.families.settings import Config, Setting
from mcore_ckpt_ext.families.validation import check_plain
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import (
    ModelArguments,
    complete,
    has_experts,
)
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.settings import ACCEPT_KEYS

_SHOWN, _MOST_SHOWN = 40, 6

_Places = Mapping[str, int]
"""What stands for the fields of a rule's names."""

Condition = Callable[[ModelArguments, int], bool]
"""Says, for a job's arguments and a decoder layer (0 outside the layers), whether a rule holds there."""


Piece = tuple[str, int, int]
"""Of a parameter that is stored in several: the end of its name, the first row, and the number of rows."""


def always(arguments: ModelArguments, layer: int) -> bool:
    """In every model and layer."""
    return True


def dense(arguments: ModelArguments, layer: int) -> bool:
    """In layers without experts."""
    return not has_experts(arguments, layer)


def with_experts(arguments: ModelArguments, layer: int) -> bool:
    """In layers with experts."""
    return has_experts(arguments, layer)


def untied(arguments: ModelArguments, layer: int) -> bool:
    """In models whose output layer is not the word embedding."""
    return bool(arguments.untie_embeddings_and_output_weights)


def set_in(argument: str) -> Condition:
    """In models with this argument."""
    return lambda arguments, layer: bool(arguments.value(argument))


@dataclass(frozen=True)
class Rule:
    """Where a Hugging Face tensor comes from.

    Attributes:
        hugging_face: its name; `{layer}` and `{expert}` stand for every layer and expert. Of an MTP layer,
            `{next}` is its number after the decoder's layers, and Megatron's `{step}` counts them.
        megatron: the parameter's name in model space, as the Transformer Engine spec stores it. With `{expert}` only
            here, the tensor is a stack of all experts.
        rows: which of the parameter's rows; by default all.
        where: in which models and layers.
        keeps_dtype: `--dtype` leaves it as it is.
        pieces: where the parameter is stored in several, what the tensor consists of; `rows` does not count then.
        swapped: each row begins with the second half of Megatron's.
    """

    hugging_face: str
    megatron: str
    rows: Rows = WHOLE
    where: Condition = always
    keeps_dtype: bool = False
    pieces: Callable[[ModelArguments], Sequence[Piece]] | None = None
    swapped: bool = False


@dataclass(frozen=True)
class HuggingFaceTensor:
    """A Hugging Face tensor: its name, its shape, and the regions that it consists of, one after the other.

    `transposed`: the regions of each parameter are rows of one matrix, and the tensor holds the transpose of that
    matrix. `interleaved`: its rows come by turns from so many parts of the parameter, of equal height. `shift`: what
    its numbers are more.
    """

    name: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    transposed: bool = False
    interleaved: int = 1
    shift: float = 0.0
    keeps_dtype: bool = False


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
                raise ValueError("one expert for each token, whose gate is normalised to 1: Megatron has no such")
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
        shown = ", ".join(f"{key}: {shortened(repr(config[key]), _SHOWN)}" for key in strange[:_MOST_SHOWN])
        more = f", and {len(strange) - _MOST_SHOWN} more" if len(strange) > _MOST_SHOWN else ""
        accept = " ".join(f"--accept-key {key}" for key in strange[:_MOST_SHOWN])
        raise UnsupportedCheckpointError(
            f"config.json has keys unknown for {self.name} that may change what the model computes",
            found=shown + more + (f" ({neutral.strict})" if neutral.strict else ""), where="config.json",
            hint=f"if they do not: {accept} (a job: {ACCEPT_KEYS.flag}); to map them: mcore-ckpt convert --family "
            "path.py:Name",
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
        """What a user should know about models with these arguments."""
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
            for layer, places in _places(rule, arguments):
                if rule.where(arguments, layer):
                    found += list(self._tensors_of(rule, places, arguments))
        return found

    def copies(self, arguments: ModelArguments) -> list[HuggingFaceTensor]:
        """Tensors that a folder may hold although they repeat others, under the regions of those."""
        return [
            self._tensor(rule, places, 0, arguments)
            for rule in self.repeated
            for layer, places in _places(rule, arguments)
            if rule.where(arguments, layer)
        ]

    def mtp_layers(self, names: Collection[str], arguments: ModelArguments) -> int:
        """How many multi-token prediction (MTP) layers a folder holds, beside those of the decoder."""
        return 0

    def _rules_for(self, present: Collection[str]) -> list[Rule]:
        patterns = {rule: _pattern(rule.hugging_face) for rule in self.read_rules}
        first = [rule for rule, pattern in patterns.items() if any(map(pattern.fullmatch, present))]
        replaced = {rule.megatron for rule in first}
        return [rule for rule in self.rules if rule.megatron not in replaced] + first

    def _tensors_of(self, rule: Rule, places: _Places, arguments: ModelArguments) -> Iterator[HuggingFaceTensor]:
        experts = range(arguments.num_experts or 0) if "{expert}" in rule.megatron else range(1)
        parts = [self._tensor(rule, places, expert, arguments) for expert in experts]
        if "{expert}" in rule.hugging_face or "{expert}" not in rule.megatron:
            yield from parts
        else:
            regions = tuple(region for part in parts for region in part.regions)
            yield replace(parts[0], shape=(len(parts), *parts[0].shape), regions=regions)

    def _tensor(self, rule: Rule, places: _Places, expert: int, arguments: ModelArguments) -> HuggingFaceTensor:
        generic = rule.megatron.format(expert=expert, **places)
        if rule.pieces is not None:
            pieces = rule.pieces(arguments)
        else:
            pieces = [("", *span) for span in rule.rows.spans(self.shape(generic, arguments)[0], arguments)]
        inner = self.shape(generic + pieces[0][0], arguments)[1:]
        name = spec_name(generic, arguments)
        regions = tuple(
            Region(name + end, (start, *(0 for _ in inner)), (count, *inner)) for end, start, count in pieces
        )
        if rule.swapped:
            regions = tuple(half for region in regions for half in _halves_swapped(region))
        rows = sum(count for _, _, count in pieces)
        turned = rule.rows.transposed
        return HuggingFaceTensor(
            rule.hugging_face.format(expert=expert, **places),
            (*inner, rows) if turned else (rows, *inner), regions, turned, rule.rows.interleaved, rule.rows.shift,
            rule.keeps_dtype,
        )  # fmt: skip


def _with_mtp_of(job: ModelArguments, described: ModelArguments) -> ModelArguments:
    """What `config.json` describes, without MTP layers where the job has none."""
    return described if job.mtp_num_layers else described.changed(mtp_num_layers=None)


def _halves_swapped(region: Region) -> Iterator[Region]:
    """Of each row of a matrix the second half, then the first."""
    rows, half = range(region.offsets[0], region.offsets[0] + region.sizes[0]), region.sizes[1] // 2
    return (Region(region.name, (row, start), (1, half)) for row in rows for start in (half, 0))


def _places(rule: Rule, arguments: ModelArguments) -> Iterator[tuple[int, _Places]]:
    """Each layer that a rule is about: as its condition knows it, and what its names are filled with."""
    if (
        "{next}" in rule.hugging_face or "{step}" in rule.megatron
    ):  # such a layer is built as the decoder's last one (`get_gpt_mtp_block_spec`)
        layers = arguments.num_layers
        yield from (
            (layers - 1, {"next": layers + step, "step": step}) for step in range(arguments.mtp_num_layers or 0)
        )
    else:
        number = arguments.num_layers if "{layer}" in rule.hugging_face else 1
        yield from ((layer, {"layer": layer}) for layer in range(number))


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(layer|expert|next|step)\\\}", r"\\d+", re.escape(template)))


def matching(names: Collection[str], patterns: Sequence[str]) -> list[str]:
    """The names that contain one of the patterns."""
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def parameter_shapes(tensors: Sequence[HuggingFaceTensor]) -> Mapping[str, tuple[int, ...]]:
    """Megatron's parameters that the tensors consist of, and their shapes.

    Raises:
        UnsupportedCheckpointError: rows of a parameter are left out, or taken twice.
    """
    spans: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    inner: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        for region in tensor.regions:
            name, behind = region.name, region.offsets[1:]
            spans.setdefault((name, behind), []).append((region.offsets[0], region.sizes[0]))
            ends = tuple(offset + size for offset, size in zip(behind, region.sizes[1:], strict=True))
            inner[name] = max(ends, inner.get(name, ends))
    shapes: dict[str, tuple[int, ...]] = {}
    for (name, _), found in spans.items():
        end = 0
        for start, count in sorted(found):
            if start != end:
                raise UnsupportedCheckpointError(
                    "the family's rules omit or repeat rows of a parameter",
                    found=f"row {start} after row {end - 1}", where=name,
                )  # fmt: skip
            end += count
        shapes[name] = (end, *inner[name])
    return shapes
