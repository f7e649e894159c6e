"""Gives `--use-checkpoint-args` the arguments of checkpoints that stock Megatron cannot read.

Stock reads them before it sets up its process groups (`load_args_from_checkpoint`, megatron/training/checkpointing.py,
core_v0.7.0 to 0.19.2), by the same `_load_base_checkpoint` as in `load_checkpoint`.
"""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from typing import Any

from mcore_ckpt_ext.formats.legacy.reader import LegacyCheckpoint
from mcore_ckpt_ext.megatron.presentation import session_to_present
from mcore_ckpt_ext.megatron.sources.legacy_state_dict import as_base_checkpoint
from mcore_ckpt_ext.patching.overrides import overridden, scope_of
from mcore_ckpt_ext.patching.patch_point import Function
from mcore_ckpt_ext.storage.dtypes import with_torch_dtypes


def wrap_load_args(original: Function) -> Function:
    """Return a `load_args_from_checkpoint` that also reads what stock cannot, except legacy files."""
    scope = scope_of(original)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_args_from_checkpoint(*positional: Any, **keywords: Any) -> Any:
        call = signature.bind(*positional, **keywords)
        call.apply_defaults()
        arguments = call.arguments["args"]
        session = session_to_present(getattr(arguments, call.arguments["load_arg"], None), arguments)
        if session is None or LegacyCheckpoint.recognizes(session.index):
            return original(*positional, **keywords)
        checkpoint = session.checkpoint
        state = {**checkpoint.job.common(), "args": Namespace(**checkpoint.job.args)}
        base_checkpoint = as_base_checkpoint(
            scope, with_torch_dtypes(state), session.folder, is_release=checkpoint.job.is_release
        )
        with overridden(scope, _load_base_checkpoint=lambda *_, **__: base_checkpoint):
            return original(*positional, **keywords)

    return load_args_from_checkpoint
