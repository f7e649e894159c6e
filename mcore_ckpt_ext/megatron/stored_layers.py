"""Lets `dist_checkpointing.load` request layers by the keys of the checkpoint, stacked or numbered.

Megatron requests layers by the keys of the running model, and fails with a KeyError if the checkpoint has the other
form (`LayerStacks`). Within a load, the requests are translated once the factories are expanded and before anything
else sees them (`load_preprocess`, called by `load`, megatron/core/dist_checkpointing/serialization.py, core_v0.12.1 to
0.19.2 and the development head). So the checks of access and strictness, Megatron's own loader and this package's
(`fast_load`) all see the stored keys; the values are returned by their places in the state dict, which stay.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mcore_ckpt_ext.collectives import agree, is_first_rank
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.trees import items_of
from mcore_ckpt_ext.model_space.layer_stacks import LayerStacks, split_key
from mcore_ckpt_ext.model_space.names import stacked_axes
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.overrides import overridden


def request_stored_layers(load: Callable[..., Any], session: LoadSession) -> Callable[..., Any]:
    """Wrap `dist_checkpointing.load` of a folder: request layers by the keys of the checkpoint."""
    signature = inspect.signature(load)
    scope = inspect.unwrap(load).__globals__

    @functools.wraps(load)
    def load_by_stored_keys(*positional: Any, **keywords: Any) -> Any:
        call = signature.bind(*positional, **keywords).arguments
        # With this check Megatron compares the requests of all ranks, so that all ranks make this call.
        by_all = call.get("validate_access_integrity", True) and call.get("process_group") is None
        preprocess = scope.get("load_preprocess")
        stacks = None if preprocess is None else _stored_stacks(session, by_all=by_all)
        if preprocess is None or stacks is None:
            return load(*positional, **keywords)

        def load_preprocess(tree: Any) -> Any:
            request, *others = preprocess(tree)
            _announce(_translate(request, stacks))
            return request, *others

        with overridden(scope, load_preprocess=load_preprocess):
            return load(*positional, **keywords)

    return load_by_stored_keys


def _stored_stacks(session: LoadSession, *, by_all: bool) -> LayerStacks | None:
    """Return the form of the stored layers; None if it is unknown. Collective if `by_all`."""

    def read() -> LayerStacks | None:
        if by_all and not is_first_rank():
            return None
        with suppress(CheckpointError, OSError):  # Megatron meets the error again and reports it
            index = session.checkpoint.files.index()
            if index is not None:
                return LayerStacks.from_shapes({key: array.shape for key, array in index.arrays.items()})
        return None

    return agree("looking at the checkpoint", read)[0] if by_all else read()


def _translate(tree: Any, stacks: LayerStacks) -> set[bool]:
    """Translate all requests in a tree, in place.

    Returns:
        True for translations to stacked layers, False for those to keys of each layer; empty if all keys are stored.
    """
    forms: set[bool] = set()
    for place, value in list(items_of(tree)):
        if isinstance(value, (dict, list)):
            forms |= _translate(value, stacks)
        elif hasattr(value, "key") and (translated := with_stored_layer(value, stacks)) is not value:
            forms.add(len(translated.key) < len(value.key))
            tree[place] = translated
    return forms


def with_stored_layer(entry: Any, stacks: LayerStacks) -> Any:
    """Return a ShardedTensor or ShardedObject with its layer as stored; itself if it already is so.

    Its axes: layers if they are stacked, then experts, then those of the tensor. An object has at least one axis
    (`make_sharded_object_for_checkpoint`, megatron/core/transformer/utils.py, core_v0.7.0 to 0.19.2).
    """
    key = split_key(entry.key)
    layers = None if key is None else stacks.layers.get(key.block)
    if key is None or layers is None or bool(layers) == (key.layer is None):
        return entry
    is_tensor = hasattr(entry, "axis_fragmentations")
    if key.layer is None:
        layer, *offsets = entry.global_offset
        shape = entry.global_shape[1:]
        stored = str(key._replace(layer=layer))
        if is_tensor:
            pieces = entry.axis_fragmentations
            return replace(
                entry,
                key=stored,
                global_shape=shape,
                global_offset=tuple(offsets),
                axis_fragmentations=pieces and pieces[1:],
                prepend_axis_num=entry.prepend_axis_num - 1,
            )
        return replace(entry, key=stored, global_shape=shape or (1,), global_offset=tuple(offsets) or (0,))
    if key.layer >= layers:
        return entry  # the checkpoint has no such layer, which Megatron reports
    stored = str(key._replace(layer=None))
    if is_tensor:
        pieces = entry.axis_fragmentations
        return replace(
            entry,
            key=stored,
            global_shape=(layers, *entry.global_shape),
            global_offset=(key.layer, *entry.global_offset),
            axis_fragmentations=pieces and (layers, *pieces),
            prepend_axis_num=entry.prepend_axis_num + 1,
        )
    has_axis = stacked_axes(entry.key) > 0
    shape, offset = (entry.global_shape, entry.global_offset) if has_axis else ((), ())
    return replace(entry, key=stored, global_shape=(layers, *shape), global_offset=(key.layer, *offset))


def _announce(forms: set[bool]) -> None:
    """Say that the layers are requested in another form than the model's."""
    for stacked in sorted(forms):
        announce(
            "the layers are stored in stacked arrays, and this model keeps each by itself: loaded by the stored keys"
            if stacked
            else "each layer is stored by itself, and this model stacks its layers: loaded by the stored keys"
        )
