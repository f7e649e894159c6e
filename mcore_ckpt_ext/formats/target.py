"""Base class of the write options of all formats: shared options and their checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata
from inspect import signature
from typing import ClassVar, Literal, TypeAlias

from mcore_ckpt_ext.errors import UsageError, shorten
from mcore_ckpt_ext.job.releases import HAS_KNOWN_FORMATS
from mcore_ckpt_ext.versions import NEWEST, OLDEST, Version, parse_version

LAYER_SPECS = ("transformer_engine", "local")
LayerSpec: TypeAlias = Literal["transformer_engine", "local"]


class Target:
    """What a conversion writes; each format derives a dataclass from it, with the options that it has.

    Sizes are given as Megatron names them. What is left out (None) is taken from the source, or from what is installed.

    Attributes:
        name: how `mcore-ckpt convert --to` calls it.
        is_model_folder: whether it is a folder of transformers or of peft, without place for a job.
        for_adam: whether its optimizer is Adam's, with all of its state.
        for_any_optimizer: whether parameters may differ in what state they have.
        whole_states: whether optimizers that keep whole parameters hold all of the state where the source has such.
        places_mtp: whether it says which rank holds the layers that predict further tokens.
        holds_adapters: whether it has a place for adapters.
        megatron_version, expert_model_parallel_size, transformer_impl, vocab_size, lora_alpha, arguments: options that
            several formats have, see there.
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
        """The names of the options that the format has."""
        return set(signature(cls).parameters)

    @property
    def for_bridge(self) -> bool:
        """Whether Megatron-Bridge will read it."""
        return False

    @property
    def weights_alone(self) -> bool:
        """Whether nothing but weights is taken from the source."""
        return False

    @property
    def reads(self) -> Sequence[str | os.PathLike[str]]:
        """Folders beside the source that are read."""
        return ()


def version_number(version: str | None) -> Version:
    """Major and minor number of a version of Megatron; None is the installed one, else the newest known.

    Raises:
        UsageError: it is no version, or none that is known or follows those.
    """
    text = installed_version() if version is None else version
    found = parse_version(text)
    if found is None:
        shown = shorten(repr(text), 40)
        raise UsageError("invalid version of Megatron", found=shown, expected="for example 0.16.1")
    if not HAS_KNOWN_FORMATS.is_of(found):
        expected = f"{OLDEST} to {NEWEST}, or what follows it"
        raise UsageError("unknown version of Megatron", found=str(found), expected=expected)
    return found


def installed_version() -> str:
    """The version of the installed megatron-core, else the newest known."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return str(NEWEST)


def check_sizes(**sizes: int | None) -> None:
    """Check sizes by the names of their options.

    Raises:
        UsageError: one is no whole number of 1 or more.
    """
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise UsageError(f"{name} has to be a whole number of 1 or more", found=repr(size))


def check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Check the value of an option.

    Raises:
        UsageError: it is not one of its choices.
    """
    if value is not None and value not in choices:
        raise UsageError(f"invalid value of {name}", found=repr(value), expected=", ".join(choices))
