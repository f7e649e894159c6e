"""The arguments of a job that this package uses: typed, checked once, with unset distinct from None.

Every description of a job in a checkpoint becomes a `JobArguments`: Megatron's parsed `args`, and the configurations of
other training loops. Other code does not look up arguments by name, except with tables of names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.job.arguments.kinds import is_whole
from mcore_ckpt_ext.job.arguments.model import ModelTable
from mcore_ckpt_ext.job.arguments.row import PartialArguments, rows_of
from mcore_ckpt_ext.job.arguments.run import RunTable
from mcore_ckpt_ext.job.releases import Capability
from mcore_ckpt_ext.versions import Version

# Far more than any model has had; code iterates over all of them.
_MOST_EXPERTS_IN_ALL = 1 << 20
_ROWS = rows_of(ModelTable, RunTable)
FIELDS = frozenset(_ROWS)
"""The names of all arguments that are used."""
PARTIAL = "mcore_ckpt_ext_partial"
"""An argument that marks converted arguments as incomplete."""


@dataclass(frozen=True, kw_only=True)
class JobArguments(ModelTable, RunTable, PartialArguments):
    """The known arguments of a job, by Megatron's names.

    Each row of `ModelTable` and `RunTable` is an attribute. Its value is None if the argument is unknown, and also if
    Megatron's value is None; `is_set` distinguishes these cases. Unset arguments do not have Megatron's defaults here,
    but in `job.model_arguments.ModelArguments`.

    Attributes:
        raw: all arguments of the source, by name and unchanged.
        source: origin of the arguments, for messages.
        version: release of Megatron Core of the job; None if it is not recorded.
        is_complete: the source has every argument of its job, as Megatron's own `args` have. Then a missing argument
            did not exist in its version. Other descriptions may omit arguments.

    Raises:
        UnreadableCheckpointError: an argument has a value that no job can have.
    """

    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    source: str = "the arguments of the job"
    version: Version | None = None
    is_complete: bool = True

    def __post_init__(self) -> None:
        for name, expected in invalid_values(self.raw):
            raise self._refusal(name, format_untrusted(self.raw[name]), expected)
        layers = self.num_layers or 0
        pattern = self.moe_layer_freq
        if layers * (self.num_experts or 0) > _MOST_EXPERTS_IN_ALL:
            raise self._refusal(
                "num_experts", f"{self.num_experts} in each of {quantity(layers, 'layer')}", "far fewer in all"
            )
        if isinstance(pattern, Sequence) and len(pattern) < layers:
            raise self._refusal(
                "moe_layer_freq", quantity(len(pattern), "item"), f"one for each of {quantity(layers, 'layer')}"
            )

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        *,
        source: str = "the arguments of the job",
        version: Version | None = None,
        is_complete: bool = True,
    ) -> JobArguments:
        """Create job arguments from a mapping with Megatron's names; those without a row are kept in `raw`.

        Args:
            values: values by name.
            source: origin of the arguments, for messages.
            version: release of Megatron Core that wrote the source; None if it is not recorded.
            is_complete: the source has every argument of its job.

        Raises:
            UnreadableCheckpointError: an argument has a value that no job can have.
        """
        return cls(raw=MappingProxyType(dict(values)), source=source, version=version, is_complete=is_complete)

    def value_of(self, name: str) -> Any:
        """Return an argument by name; None if it is unknown."""
        return self.raw.get(name)

    def is_set(self, name: str) -> bool:
        """Return whether the source has an argument, even if its value is None."""
        return name in self.raw

    def absent_in_version(self, name: str) -> bool:
        """Return whether an argument did not exist in the job's version; False if a source merely omits it."""
        return self.is_complete and name not in self.raw

    def release_has(self, capability: Capability) -> bool:
        """Return whether the job's release has a behavior, by its version, or by an argument that shows it."""
        return capability.is_of(self.version) if self.version else capability.is_shown_by(self)

    def value(self, name: str) -> Any:
        """Return an argument that a table names; None if it is unknown.

        Raises:
            UnsupportedCheckpointError: this package does not use the argument, and the source does not have it.
        """
        if name not in FIELDS and name not in self.raw:
            raise UnsupportedCheckpointError("unknown argument", found=name, where=self.source)
        return self.raw.get(name)

    def whole(self, name: str) -> int:
        """Return an argument that must be set to an integer.

        Raises:
            UnsupportedCheckpointError: the argument is unset, or not an integer.
        """
        value = self.value(name)
        if not is_whole(value):
            raise UnsupportedCheckpointError("unknown argument of the job", expected=name, where=self.source)
        return int(value)

    @property
    def layer_counts(self) -> set[int]:
        """The known numbers of layers of the model; an encoder and a decoder may have different ones."""
        counts = (self.num_layers, *(self.raw.get(name) for name in ("encoder_num_layers", "decoder_num_layers")))
        return {count for count in counts if isinstance(count, int)}

    @property
    def tokens(self) -> int | None:
        """Number of tokens without padding; None if it comes from a tokenizer."""
        if not self.vocab_size:
            return None
        # Up to 0.17 the end-of-document token was an additional one (null_tokenizer.py).
        null = self.tokenizer_type == "NullTokenizer"
        return self.vocab_size + (null and not self.is_set("null_tokenizer_pad_id"))

    def replace(self, *, source: str | None = None, version: Version | None = None, **changes: Any) -> JobArguments:
        """Return a copy with some arguments replaced, and perhaps another release.

        Args:
            source: the new origin, for messages.
            version: the release of the job that runs with them.
            **changes: arguments by name.
        """
        return JobArguments.of(
            {**self.raw, **changes},
            source=source or self.source,
            version=version or self.version,
            is_complete=self.is_complete,
        )

    def _refusal(self, name: str, invalid_value: str, expected: str) -> UnreadableCheckpointError:
        return UnreadableCheckpointError(
            "an argument of the job has an invalid value",
            found=f"{name}: {invalid_value}",
            expected=expected,
            where=self.source,
        )


def invalid_values(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the arguments with a value that no job can have, each with what it may be, in words."""
    for name, row in _ROWS.items():
        kind = row.values.kind
        if (value := values.get(name)) is not None and not kind.accepts(value):
            yield name, kind.expected


def format_untrusted(value: Any) -> str:
    """Format an untrusted value for a message.

    Only the type of an object is shown, and only the size of a large number.
    """
    if is_whole(value) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length():,} bits"
    return repr(value)[:80] if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
