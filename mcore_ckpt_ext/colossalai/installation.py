"""Adds the strict methods to ColossalAI's classes, and removes them again.

Unlike the patches of Megatron, ``import torch`` does not apply these: they change the content of a state dict, so the
user has to request them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from mcore_ckpt_ext.colossalai.classes import PLUGINS, STATIC_MODEL, STATIC_MODEL_MODULES, WRAPPER, Target, find
from mcore_ckpt_ext.colossalai.state import Precision, get_static_torch_model
from mcore_ckpt_ext.patching.patch_point import PatchPointStatus
from mcore_ckpt_ext.patching.singletons import PROCESS

_ABSENT = object()
_lock = threading.RLock()


class _Patched(dict[Any, dict[str, tuple[Any, Any]]]):
    """For every patched class and module: the former value of each patched name, and the new one."""


def install(dtype: Precision = "master", plugins: str | Sequence[str] = ("gemini",)) -> None:
    """Give ColossalAI's classes the strict methods; a second call sets the dtype, and adds plugins.

    Args:
        dtype: the precision of Gemini's `state_dict()` and of Booster's files: "master" (fp32, exact), "compute", or a
            torch.dtype. Unless the model's file is exact, the optimizer's file contains the masters.
        plugins: "gemini" for ZeroDDP or GeminiDDP, GeminiOptimizer, their files by Booster, and the static model of
            `colossalai.zero`; "low_level_zero" for masters and loss scale in the optimizer's files of ZeRO 1 and 2;
            "hybrid_parallel" for masters and loss scale in HybridParallelPlugin's files, for moments in the order of
            their parameters, and for strict loading.

    Raises:
        CheckpointError: ColossalAI is missing or incomplete; nothing is patched.
        ValueError: the dtype or a plugin is unknown; nothing is patched.
    """
    if not (dtype in ("master", "compute") or isinstance(dtype, torch.dtype)):
        raise ValueError(f'dtype is {dtype!r}; expected "master", "compute" or a torch.dtype')
    names = (plugins,) if isinstance(plugins, str) else tuple(plugins)
    unknown = [name for name in names if name not in PLUGINS]
    if unknown:
        raise ValueError(f"plugins has {unknown}; expected some of {list(PLUGINS)}")
    classes = {target: find(target) for name in names for target in PLUGINS[name]}
    with _lock:
        for target, cls in classes.items():
            if cls is not None and cls not in _patched_methods():
                _patch(cls, target)
        if WRAPPER in classes:
            _replace_static_model()
            _put(classes[WRAPPER], "_strict_dtype", dtype)


def _replace_static_model() -> None:
    for module in map(sys.modules.get, STATIC_MODEL_MODULES):
        if module is not None and module not in _patched_methods() and hasattr(module, STATIC_MODEL):
            _patched_methods()[module] = {}
            _put(module, STATIC_MODEL, get_static_torch_model)


def uninstall() -> None:
    """Restore every class; methods that another package has put on top of ours stay."""
    with _lock:
        for owner, attributes in _patched_methods().items():
            for name, (before, ours) in attributes.items():
                if vars(owner).get(name, _ABSENT) is not ours:
                    continue
                if before is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)
        _patched_methods().clear()


def status() -> list[PatchPointStatus]:
    """Report for every class whether its methods are strict; imports nothing."""
    version = getattr(sys.modules.get("colossalai"), "__version__", None)
    with _lock:
        patched = {f"{cls.__module__}.{cls.__qualname__}" for cls in _patched_methods() if isinstance(cls, type)}
    answers = []
    for target in (target for targets in PLUGINS.values() for target in targets):
        locations = [location.replace(":", ".") for location in target.locations]
        patched_location = next((location for location in locations if location in patched), None)
        if patched_location:
            answers.append(PatchPointStatus(patched_location, "patched", version))
        else:
            reason = "not installed, or this version has no such class" if patched else "not installed"
            answers.append(PatchPointStatus(locations[-1], "not patched", version, reason))
    return answers


def _patched_methods() -> _Patched:
    return PROCESS.one(_Patched)


def _patch(cls: type, target: Target) -> None:
    _patched_methods()[cls] = {}
    for name, value in target.methods.namespace(cls).items():
        _put(cls, name, value)


def _put(owner: Any, name: str, value: Any) -> None:
    before = _patched_methods()[owner].get(name, (vars(owner).get(name, _ABSENT), None))[0]
    setattr(owner, name, value)
    _patched_methods()[owner][name] = before, value
