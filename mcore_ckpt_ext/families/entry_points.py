"""Families that other distributions register in the entry-point group `mcore_ckpt_ext.families`.

The name of an entry point is the `model_type` of `config.json`, and its value the class: `parrot =
"parrot_families:Parrot"`. So registered families are known from metadata alone, and no code runs until a model of that
type is read.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import CheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.families.family import Family

GROUP = "mcore_ckpt_ext.families"
_REQUIRED = ("model_type", "architecture", "rules", "settings")
_LOG = logging.getLogger("mcore_ckpt_ext")


@dataclass(frozen=True)
class RegisteredFamily:
    """An entry point of the group; its class is imported by `load`."""

    entry: EntryPoint
    distribution: str

    @property
    def model_type(self) -> str:
        """The `model_type` of the family."""
        return self.entry.name

    @property
    def class_name(self) -> str:
        """The name of the class, for `--family`."""
        return self.entry.value.rpartition(":")[2].strip()

    def load(self) -> Family:
        """Import the class and return its family.

        Raises:
            UnsupportedCheckpointError: the class cannot be imported, or is not a family of this `model_type`.
        """
        try:
            made = self.entry.load()
            family = made() if isinstance(made, type) and issubclass(made, Family) else None
            missing = [name for name in _REQUIRED if family and not hasattr(family, name)]
            model_type = family.model_type if family and not missing else self.model_type
            if family:
                family.origin = self.distribution
        except (Exception, SystemExit) as error:
            raise self._registration_error("cannot be imported", repr(error)) from error
        if family is None:
            raise self._registration_error("is not a class derived from families.family.Family", self.entry.value)
        if missing:
            raise self._registration_error("lacks attributes that every family must have", ", ".join(missing))
        if model_type != self.model_type:
            raise self._registration_error("is registered under another model_type than its own", model_type)
        return _AttributedFamily(family, self)

    def _registration_error(self, problem: str, details: str) -> UnsupportedCheckpointError:
        return UnsupportedCheckpointError(
            f"the family that {self.distribution} registers {problem}",
            found=details,
            where=f"entry point {self.entry.name} = {self.entry.value} of the group {GROUP}",
            hint="update or uninstall that distribution, or name a family: --family NAME",
        )


@functools.cache
def registered_families(taken: frozenset[str]) -> tuple[RegisteredFamily, ...]:
    """Return the families of other distributions, from metadata alone.

    Args:
        taken: every `model_type` of this package. Families of this package have precedence, then the first registered
            one; a warning names the others.
    """
    families: dict[str, RegisteredFamily] = {}
    for registered in _registered_families():
        before = families.get(registered.model_type)
        if before is None and registered.model_type not in taken:
            families[registered.model_type] = registered
            continue
        owner = before.distribution if before else "this package"
        _LOG.warning(
            "the family %s that %s registers is not used: %s has a family of that model_type; to use it all the same: "
            "--family path.py:%s",
            registered.model_type,
            registered.distribution,
            owner,
            registered.class_name,
        )
    return tuple(families.values())


def loadable(registered: RegisteredFamily) -> Family | None:
    """Return the family, or None after logging the error: the model may belong to another family."""
    try:
        return registered.load()
    except UnsupportedCheckpointError as error:
        _LOG.warning("%s", error)
        return None


class _AttributedFamily(Family):
    """A wrapper of a registered family whose exceptions become errors with the distribution's name.

    Every attribute is that of the family. Calls within the family are not wrapped.
    """

    def __init__(self, family: Family, registered: RegisteredFamily) -> None:
        self._family = family
        self._registered = registered

    def __getattribute__(self, name: str) -> Any:
        get_attribute = super().__getattribute__
        if name in ("_family", "_registered", "_attribute") or name.startswith("__"):
            return get_attribute(name)
        family = get_attribute("_family")
        attributed = get_attribute("_attribute")
        member = attributed(lambda: getattr(family, name))
        return member if not callable(member) else lambda *values, **named: attributed(lambda: member(*values, **named))

    @override
    def __repr__(self) -> str:
        return str(self._attribute(lambda: repr(self._family)))

    def _attribute(self, call: Callable[[], Any]) -> Any:
        """Call code of the family.

        Raises:
            UnsupportedCheckpointError: the code raises an error that is not this package's.
        """
        try:
            reply = call()
            return list(reply) if isinstance(reply, Iterator) else reply  # a generator raises only when it is consumed
        except CheckpointError:
            raise
        except (Exception, SystemExit) as error:
            registered = self._registered
            raise UnsupportedCheckpointError(
                f"the family {registered.class_name} (registered by {registered.distribution}) raises an error",
                found=repr(error),
                where=registered.distribution,
                hint="report it to the authors of that distribution",
            ) from error


def _registered_families() -> Iterator[RegisteredFamily]:
    """Yield registered families in the order of `sys.path`: the first of two equal names is imported."""
    seen = set()
    for distribution in distributions():
        try:
            entries = list(distribution.entry_points.select(group=GROUP))
            name = _name(distribution) if entries else ""
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:  # damaged metadata
            _LOG.warning("the entry points of %s cannot be read: %r", _place(distribution), error)
            continue
        if entries and name not in seen:
            seen.add(name)
            yield from (RegisteredFamily(entry, name) for entry in entries)


def _name(distribution: Distribution) -> str:
    name = distribution.metadata["Name"]
    return f"{name} {distribution.version}" if name else _place(distribution)


def _place(distribution: Distribution) -> str:
    return str(getattr(distribution, "_path", None) or "an installed distribution")
