"""The arguments of a job, as far as this package looks at them: typed, checked once, and honest about what is unknown.

Whatever a checkpoint has becomes one `JobArguments`: Megatron's parsed `args`, and what other training loops describe
their jobs by. Nothing else looks arguments up by name, but for tables of names that are data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.job.arguments.kinds import is_whole
from mcore_ckpt_ext.job.arguments.model import ModelTable
from mcore_ckpt_ext.job.arguments.row import PartialArguments, rows_of
from mcore_ckpt_ext.job.arguments.run import RunTable
from mcore_ckpt_ext.versions import Version

# Many times what there has been; they are walked one by one.
_MOST_EXPERTS_IN_ALL = 1 << 20
_ROWS = rows_of(ModelTable, RunTable)
FIELDS = frozenset(_ROWS)
"""The names of all arguments that are looked at."""


@dataclass(frozen=True, kw_only=True)
class JobArguments(ModelTable, RunTable, PartialArguments):
    """The known arguments of a job, by Megatron's names.

    Each row of `ModelTable` and `RunTable` is an attribute. It is None where the argument is not known, and where it is
    None for Megatron, too; `is_set` tells these apart. None has Megatron's default in place of what nobody stated:
    that is for `job.model_arguments.ModelArguments`.

    Attributes:
        raw: everything that the source says, by name, as it says it.
        source: what states it, for messages.
        version: the release of Megatron Core that wrote the source, where that is recorded.
        is_complete: the source has every argument of its job, as Megatron's own `args` do: one that it does not state
            did not exist in its version. Other descriptions leave out what they please.

    Raises:
        UnreadableCheckpointError: an argument has a value that no job can have.
    """

    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    source: str = "the arguments of the job"
    version: Version | None = None
    is_complete: bool = True

    def __post_init__(self) -> None:
        for name, row in _ROWS.items():
            value, kind = self.raw.get(name), row.values.kind
            if value is not None and not kind.accepts(value):
                raise self._refused(name, _shown(value), kind.expected)
        layers, pattern = self.num_layers or 0, self.moe_layer_freq
        if layers * (self.num_experts or 0) > _MOST_EXPERTS_IN_ALL:
            raise self._refused("num_experts", f"{self.num_experts} in each of {layers} layers", "far fewer in all")
        if isinstance(pattern, Sequence) and len(pattern) < layers:
            raise self._refused("moe_layer_freq", f"{len(pattern)} items", f"one for each of {layers} layers")

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        *,
        source: str = "the arguments of the job",
        version: Version | None = None,
        is_complete: bool = True,
    ) -> JobArguments:
        """From Megatron's parsed arguments, or anything else with its names; what has no row is kept in `raw`.

        Args:
            values: values by name.
            source: what states them.
            version: the release of Megatron Core that wrote the source, where that is recorded.
            is_complete: the source has every argument of its job.

        Raises:
            UnreadableCheckpointError: an argument has a value that no job can have.
        """
        return cls(raw=MappingProxyType(dict(values)), source=source, version=version, is_complete=is_complete)

    def value_of(self, name: str) -> Any:
        """An argument by its name; None where it is not known."""
        return self.raw.get(name)

    def is_set(self, name: str) -> bool:
        """Whether the source states an argument, be it None."""
        return name in self.raw

    def absent_in_version(self, name: str) -> bool:
        """Whether the version of the job did not have an argument yet; not where a source merely keeps it to itself."""
        return self.is_complete and name not in self.raw

    def value(self, name: str) -> Any:
        """An argument that a table names; None where it is not known.

        Raises:
            UnsupportedCheckpointError: nothing here looks at it, and the source does not state it either.
        """
        if name not in FIELDS and name not in self.raw:
            raise UnsupportedCheckpointError("unknown argument", found=name, where=self.source)
        return self.raw.get(name)

    def whole(self, name: str) -> int:
        """An argument that must be known, and a whole number.

        Raises:
            UnsupportedCheckpointError: the source does not state it.
        """
        value = self.value(name)
        if not is_whole(value):
            raise UnsupportedCheckpointError("unknown argument of the job", expected=name, where=self.source)
        return int(value)

    @property
    def layer_counts(self) -> set[int]:
        """How many layers the model has, as far as it is known; an encoder and a decoder may have different numbers."""
        stated = (self.num_layers, *(self.raw.get(name) for name in ("encoder_num_layers", "decoder_num_layers")))
        return {count for count in stated if isinstance(count, int)}

    @property
    def tokens(self) -> int | None:
        """Tokens of the vocabulary without padding; None where a tokenizer said how many."""
        if not self.vocab_size:
            return None
        # Up to 0.17 the end of a document was one more (null_tokenizer.py).
        null = self.tokenizer_type == "NullTokenizer"
        return self.vocab_size + (null and not self.is_set("null_tokenizer_pad_id"))

    @property
    def constant_batch_size(self) -> int | None:
        """Samples of an iteration where all had as many; None where it is not known, or grew (`rampup_batch_size`)."""
        return None if self.rampup_batch_size else self.global_batch_size

    def replace(self, *, source: str | None = None, **changes: Any) -> JobArguments:
        """The arguments of a job with these values in place of the present ones; `source`: what states them now."""
        return JobArguments.of(
            {**self.raw, **changes}, source=source or self.source, version=self.version, is_complete=self.is_complete
        )

    def _refused(self, name: str, found: str, expected: str) -> UnreadableCheckpointError:
        return UnreadableCheckpointError(
            "an argument of the job has an invalid value",
            found=f"{name}: {found}",
            expected=expected,
            where=self.source,
        )


def _shown(value: Any) -> str:
    """Format an untrusted value for a message: of an object only its type, of a large number only its size."""
    if is_whole(value) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length():,} bits"
    return repr(value)[:80] if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def is_hybrid(arguments: JobArguments) -> bool:
    """Whether a pattern says of each layer which mixer it has (core_v0.9.0 to 0.19.2, by either name)."""
    return bool(arguments.hybrid_layer_pattern or arguments.raw.get("hybrid_override_pattern"))
