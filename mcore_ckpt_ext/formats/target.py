"""Base class of the write options of all formats: shared options and their checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from inspect import signature
from typing import ClassVar, Literal, TypeAlias, TypeGuard

from mcore_ckpt_ext.errors import UsageError, shorten
from mcore_ckpt_ext.job.releases import HAS_KNOWN_FORMATS
from mcore_ckpt_ext.versions import NEWEST, OLDEST, Version, parse_version

LAYER_SPECS = ("transformer_engine", "local")
LayerSpec: TypeAlias = Literal["transformer_engine", "local"]


class Target:
    """Write options of a conversion; each format derives a dataclass with its own options.

    Sizes have Megatron's names. An option that is None is taken from the source, or from the installed packages.

    Attributes:
        name: its name in `mcore-ckpt convert --to`.
        is_model_folder: whether it is a folder of transformers or peft, which cannot hold a job's state.
        for_adam: whether its optimizer is Adam, with all of its state.
        for_any_optimizer: whether parameters may have different kinds of optimizer state.
        whole_states: whether an optimizer that stores whole parameters in the source keeps all of its state.
        places_mtp: whether it records which rank has the layers for multi-token prediction.
        holds_adapters: whether it can hold adapters.
        megatron_version, expert_model_parallel_size, transformer_impl, vocab_size, lora_alpha, arguments: options that
            several formats share, documented there.
    """

    name: ClassVar[str]
    is_model_folder: ClassVar[bool] = False
    for_adam: ClassVar[bool] = False
    for_any_optimizer: ClassVar[bool] = False
    whole_states: ClassVar[bool] = False
    places_mtp: ClassVar[bool] = True
    holds_adapters: ClassVar[bool] = False

    megatron_version: str | None = None
    expert_model_parallel_size: int | None = None
    transformer_impl: LayerSpec | None = None
    vocab_size: int | None = None
    lora_alpha: int | None = None
    arguments: Sequence[str] = ()

    @classmethod
    def options(cls) -> set[str]:
        """Return the names of the format's options."""
        return set(signature(cls).parameters)

    def __post_init__(self) -> None:
        """Check the options that can be checked without a source.

        Raises:
            UsageError: an option has an invalid value.
        """
        options = self.options()
        check_sizes(**{name: getattr(self, name) for name in options if name.endswith("_size")})
        check_choice("transformer_impl", self.transformer_impl, LAYER_SPECS)
        if "megatron_version" in options:
            version_number(self.megatron_version)

    @property
    def is_for_bridge(self) -> bool:
        """True if Megatron-Bridge will read it."""
        return False

    @property
    def weights_alone(self) -> bool:
        """True if only weights are taken from the source."""
        return False

    @property
    def reads(self) -> Sequence[str | os.PathLike[str]]:
        """Return additional folders to read."""
        return ()


def is_target(value: object) -> TypeGuard[Target]:
    """Return whether a value is the options of some format."""
    return isinstance(value, Target)


def version_number(version: str | None) -> Version:
    """Parse the major and minor number of a version of Megatron.

    Args:
        version: None for the installed version, or else the newest known one.

    Raises:
        UsageError: it is not a version, or it is older than all supported ones.
    """
    text = installed_version() if version is None else version
    parsed = parse_version(text)
    if parsed is None:
        found_text = shorten(repr(text), 40)
        raise UsageError("invalid version of Megatron", found=found_text, expected="for example 0.16.1")
    if not HAS_KNOWN_FORMATS.is_of(parsed):
        expected = f"{OLDEST} to {NEWEST}, or what follows it"
        raise UsageError("unknown version of Megatron", found=str(parsed), expected=expected)
    return parsed


def installed_version() -> str:
    """Return the version of the installed megatron-core, or else the newest known one."""
    return _installed_version() or str(NEWEST)


def is_installed() -> bool:
    """Return whether megatron-core is installed."""
    return _installed_version() is not None


def _installed_version() -> str | None:
    from importlib import metadata  # imports the parsers of e-mail, for the few commands that need it

    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


def check_sizes(**sizes: int | None) -> None:
    """Check sizes by the names of their options.

    Raises:
        UsageError: a size is not a positive integer.
    """
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise UsageError(f"{name} has to be a whole number of 1 or more", found=repr(size))


def check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Check the value of an option that has a list of choices.

    Raises:
        UsageError: the value is not one of the choices.
    """
    if value is not None and value not in choices:
        raise UsageError(f"invalid value of {name}", found=repr(value), expected=", ".join(choices))
