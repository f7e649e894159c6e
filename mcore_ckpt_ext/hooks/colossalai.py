"""Gives ColossalAI's classes the strict methods, and takes them back without a trace.

Unlike Megatron's seams these are not put in place by ``import torch``: what a state dict holds changes, so one asks
for it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

from mcore_ckpt_ext.hooks.registry import SeamStatus
from mcore_ckpt_ext.zero_strict_state_dict.classes import TARGETS, WRAPPER, Target, find
from mcore_ckpt_ext.zero_strict_state_dict.methods import namespace
from mcore_ckpt_ext.zero_strict_state_dict.state import Precision

_ABSENT = object()
_lock = threading.RLock()
# For every patched class what its namespace held before, and what was put there.
_patched: dict[type, dict[str, tuple[Any, Any]]] = {}


def install(dtype: Precision = "master") -> None:
    """Make the strict methods those of ZeroDDP or GeminiDDP, of GeminiOptimizer and of Booster; again only sets the
    dtype.

    Args:
        dtype: what `state_dict()` and Booster give and write: "master" (fp32, exact), "compute", or a torch.dtype.
            Unless the model's file is exact, the optimizer's file carries the masters.

    Raises:
        CheckpointError: no ColossalAI, with what is missing; or no such dtype. Nothing is patched.
    """
    if not (dtype in ("master", "compute") or isinstance(dtype, torch.dtype)):
        raise ValueError(f'dtype is {dtype!r}; expected "master", "compute" or a torch.dtype')
    classes = {target: find(target) for target in TARGETS}
    with _lock:
        for target, cls in classes.items():
            if cls is not None and cls not in _patched:
                _patch(cls, target)
        wrapper = classes[WRAPPER]
        _put(wrapper, "_strict_dtype", dtype)  # type: ignore[arg-type]  # `find` raises without a wrapper


def uninstall() -> None:
    """Give every class back what it had; what someone else has put on top of ours stays."""
    with _lock:
        for cls, attributes in _patched.items():
            for name, (before, ours) in attributes.items():
                if cls.__dict__.get(name, _ABSENT) is not ours:
                    continue
                if before is _ABSENT:
                    delattr(cls, name)
                else:
                    setattr(cls, name, before)
        _patched.clear()


def status() -> list[SeamStatus]:
    """Tell for every class whether its methods are strict; nothing is imported for that."""
    version = getattr(sys.modules.get("colossalai"), "__version__", None)
    with _lock:
        patched = {f"{cls.__module__}.{cls.__qualname__}" for cls in _patched}
    answers = []
    for target in TARGETS:
        homes = [home.replace(":", ".") for home in target.homes]
        found = next((home for home in homes if home in patched), None)
        if found:
            answers.append(SeamStatus(found, "patched", version))
        else:
            reason = "not installed" if not patched else "this version has no such class"
            answers.append(SeamStatus(homes[-1], "not patched", version, reason))
    return answers


def _patch(cls: type, target: Target) -> None:
    _patched[cls] = {}
    for name, value in namespace(target.methods, cls).items():
        _put(cls, name, value)


def _put(cls: type, name: str, value: Any) -> None:
    before = _patched[cls].get(name, (cls.__dict__.get(name, _ABSENT), None))[0]
    setattr(cls, name, value)
    _patched[cls][name] = before, value
