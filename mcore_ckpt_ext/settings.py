"""The environment variables of this package: name, meaning, default and current value.

Every `import torch` imports this module, and so does the writer process of a checkpoint: it only needs Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
# What training does when a save fails; also the values of `--ckpt-ext-on-save-failure`.
STOP = "stop"
CONTINUE = "continue"
WARN = "warn"
# What a resume does if the data does not go on in the same order; also the values of `--ckpt-ext-data-order`.
REQUIRED = "required"
# Where random states begin that the checkpoint lacks; also the values of `--ckpt-ext-random-states`.
OF_ITERATION = "iteration"
# Which loader reads tensors; also the values of `--ckpt-ext-load`.
AUTO = "auto"
STOCK = "stock"
FAST = "fast"
# Which layout a job has; also the values of `--ckpt-ext-layout`.
OF_FLAGS = "flags"
AUTO_BATCH = "auto-batch"


class Setting(Generic[Value]):
    """An environment variable and its default.

    It is read at each use, so that a program may set it after it imports this package.

    Args:
        name: the variable's name.
        meaning: the effect, as the documentation shows it after the name: "full: checksums of ...".
        default: the value if the variable is not set or its text is invalid.
        parse: returns the value of a text; raises ValueError if the text is invalid.
        argument: the command-line argument of a job with the same effect; it has priority.
    """

    def __init__(
        self, name: str, meaning: str, default: Value, parse: Callable[[str], Value], argument: str = ""
    ) -> None:
        self.name = name
        self.meaning = meaning
        self.default = default
        self.argument = argument
        self.parse = parse

    @property
    def flag(self) -> str:
        """The command-line argument as a user types it."""
        return f"--{self.argument.replace('_', '-')}"

    def choose(self, arguments: object) -> Value:
        """Return the command-line argument's value if it is given, else the environment's."""
        given: Value | None = getattr(arguments, self.argument, None)
        return self.value if given is None else given

    @property
    def text(self) -> str | None:
        """The variable's text; None if it is not set or is empty."""
        return os.environ.get(self.name) or None

    @property
    def is_valid(self) -> bool:
        """True if the variable is not set or its text is valid."""
        return self._parse_text()[1]

    @property
    def value(self) -> Value:
        """The current value."""
        return self._parse_text()[0]

    def _parse_text(self) -> tuple[Value, bool]:
        if self.text is None:
            return self.default, True
        try:
            return self.parse(self.text), True
        except ValueError:
            return self.default, False


_OFF = ("0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")


def parse_switch(text: str) -> bool:
    """Return whether a text says on or off; upper and lower case are alike.

    Raises:
        ValueError: the text is neither.
    """
    word = text.strip().lower()
    if word not in (*_OFF, *_ON):
        raise ValueError(text)
    return word in _ON


def _word(*words: str) -> Callable[[str], str]:
    """Return a parser of one of some words; upper and lower case are alike."""

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(text)
        return word

    return parse


def _switch_parser(word: str) -> Callable[[str], bool]:
    """Return a parser of a setting that is off unless its text is a word."""
    parse = _word(word, *_OFF)
    return lambda text: parse(text) == word


def _whole(text: str) -> int:
    if text.strip().lower() in _OFF:
        return 0
    if (number := int(text)) < 0:
        raise ValueError
    return number


def _names(text: str) -> tuple[str, ...]:
    return tuple(sorted({name.strip() for name in text.split(",") if name.strip()}))


def _seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) < float("inf"):
        raise ValueError
    return seconds


SWITCH = Setting("MCORE_CKPT_EXT", "0, false, no or off switches the package off", True, parse_switch)
VERIFY_ALL = Setting(
    "MCORE_CKPT_EXT_VERIFY", "full: checksums of all records before a resume", False, _switch_parser("full")
)
ACCEPT_LOST = Setting(
    "MCORE_CKPT_EXT_ACCEPT_LOST",
    "1: resume even if elements are lost",
    False,
    parse_switch,
)
NEW_TOKENS = Setting(
    "MCORE_CKPT_EXT_NEW_TOKENS",
    "keep: tokens missing from the checkpoint keep the model's initialization",
    False,
    _switch_parser("keep"),
)
PROOF = Setting(
    "MCORE_CKPT_EXT_PROOF",
    "warn: training goes on even if masters do not round to their weights",
    STOP,
    _word(STOP, WARN),
)
ON_SAVE_FAILURE = Setting(
    "MCORE_CKPT_EXT_ON_SAVE_FAILURE",
    "continue: training goes on when a save fails",
    STOP,
    _word(STOP, CONTINUE),
    argument="ckpt_ext_on_save_failure",
)
FALLBACK = Setting(
    "MCORE_CKPT_EXT_FALLBACK",
    "1: resume from the newest complete checkpoint",
    False,
    parse_switch,
    argument="ckpt_ext_fallback",
)
DATA_ORDER = Setting(
    "MCORE_CKPT_EXT_DATA_ORDER",
    "required: refuse to resume if the data does not go on in the same order, or that is unknown",
    WARN,
    _word(WARN, REQUIRED),
    argument="ckpt_ext_data_order",
)
RANDOM_STATES = Setting(
    "MCORE_CKPT_EXT_RANDOM_STATES",
    "where random states begin if tensor or pipeline parallel size has changed; iteration: at a seed that depends on "
    "the iteration, stock: at --seed, as in Megatron",
    OF_ITERATION,
    _word(OF_ITERATION, STOCK),
    argument="ckpt_ext_random_states",
)
LOAD = Setting(
    "MCORE_CKPT_EXT_LOAD",
    "which loader reads torch_dist checkpoints; fast: this package, stock: Megatron, auto: this package if the layout "
    "has changed",
    AUTO,
    _word(AUTO, STOCK, FAST),
    argument="ckpt_ext_load",
)
READ_ONCE = Setting(
    "MCORE_CKPT_EXT_READ_ONCE",
    "1: data that several ranks need is read by one of them and sent to the others",
    False,
    parse_switch,
    argument="ckpt_ext_read_once",
)
FROM_HF = Setting(
    "MCORE_CKPT_EXT_FROM_HF",
    "1: require a Hugging Face folder to start from",
    False,
    parse_switch,
    argument="ckpt_ext_from_hf",
)
ACCEPT_KEYS = Setting[tuple[str, ...]](
    "MCORE_CKPT_EXT_ACCEPT_KEYS",
    "keys of a Hugging Face folder's config.json, separated by commas, that are accepted as without effect",
    (),
    _names,
    argument="ckpt_ext_accept_keys",
)
EXPORT_HF = Setting(
    "MCORE_CKPT_EXT_EXPORT_HF",
    "write a Hugging Face folder with each checkpoint whose iteration is a multiple of this number",
    0,
    _whole,
    argument="ckpt_ext_export_hf",
)
EXPLAIN = Setting(
    "MCORE_CKPT_EXT_EXPLAIN",
    "1: print whether stock Megatron or this package loads the optimizer, and why",
    False,
    parse_switch,
)
LAYOUT = Setting(
    "MCORE_CKPT_EXT_LAYOUT",
    "auto: choose a layout that keeps the training if the job's flags do not fit the number of GPUs; auto-batch: one "
    "with another global batch if that uses more GPUs; flags: that of the flags only",
    OF_FLAGS,
    _word(OF_FLAGS, AUTO, AUTO_BATCH),
    argument="ckpt_ext_layout",
)
WRITER_PATIENCE = Setting(
    "MCORE_CKPT_EXT_WRITER_PATIENCE",
    "seconds without activity after which a writer process is given up",
    300.0,
    _seconds,
)
HEARTBEAT_TIMEOUT = Setting(
    "MCORE_CKPT_EXT_HEARTBEAT_TIMEOUT",
    "seconds without a heartbeat after which a process that shares a command counts as lost",
    60.0,
    _seconds,
)
SETTINGS = (
    SWITCH,
    VERIFY_ALL,
    ACCEPT_LOST,
    NEW_TOKENS,
    PROOF,
    ON_SAVE_FAILURE,
    FALLBACK,
    DATA_ORDER,
    RANDOM_STATES,
    LOAD,
    READ_ONCE,
    FROM_HF,
    ACCEPT_KEYS,
    EXPORT_HF,
    EXPLAIN,
    LAYOUT,
    WRITER_PATIENCE,
    HEARTBEAT_TIMEOUT,
)
"""All variables, in the order of the documentation's table, which is generated from this tuple."""


def invalid_settings() -> list[Setting[Any]]:
    """Return the settings whose variables have an invalid value."""
    return [setting for setting in SETTINGS if not setting.is_valid]
