"""A view of a checkpoint as a job with the other layer spec would have written it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.formats.expert_states import content_of
from mcore_ckpt_ext.formats.initial_extra_states import fresh_extra_states
from mcore_ckpt_ext.formats.parts import lazy
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.views import rename_tensors
from mcore_ckpt_ext.job.releases import NORMALIZES_PLAIN_QUERIES
from mcore_ckpt_ext.model_space.layer_spec import names_under_spec
from mcore_ckpt_ext.model_space.tensors import WEIGHT

ENGINE = "transformer_engine"
LOCAL = "local"


def under_layer_spec(source: CheckpointView, spec: str) -> CheckpointView:
    """Return a view of a checkpoint as a job with the other layer spec would have written it.

    Missing extra states are those of a new model; linears of the local spec have none.

    Args:
        source: the checkpoint.
        spec: the layer spec of the job that will read it.

    Raises:
        UnsupportedCheckpointError: only one of the two specs has a layer of some kind.
    """
    stored_arguments = source.job.arguments()
    source_spec = stored_arguments.transformer_impl
    of_engine = spec == ENGINE
    if source_spec not in (ENGINE, LOCAL, None):
        raise UnsupportedCheckpointError(
            "the names of this layer spec's parameters in other layer specs are unknown",
            found=source_spec,
            expected=f"{ENGINE} or {LOCAL}",
            where=str(source.files.folder),
            hint="keep the layer spec: leave --transformer-impl out",
        )
    view = rename_tensors(source, names_under_spec(source.names(WEIGHT), of_engine))
    # Only Transformer Engine has grouped experts; the local spec's grouped experts are one transposed matrix.
    grouped = bool(stored_arguments.moe_grouped_gemm) and of_engine
    arguments = stored_arguments.replace(transformer_impl=spec, moe_grouped_gemm=grouped)
    extra = lazy(lambda: _extra_states(source, view.names(WEIGHT), of_engine))
    return replace(
        view,
        job=replace(
            view.job,
            arguments=lambda: arguments,
            unbuildable=lambda version: view.job.unbuildable(version) or unbuildable(view.names(WEIGHT), version),
        ),
        optimizer=replace(view.optimizer, shows_registration=False),
        states=replace(view.states, extra=extra),
        format=replace(
            view.format,
            notices=lambda seen: [
                *view.format.notices(seen),
                *_messages(source, view.names(WEIGHT), extra(), spec),
            ],
        ),
    )


def unbuildable(names: Collection[str], version: tuple[int, int]) -> str | None:
    """Return why a version of Megatron cannot build these weights.

    See `HuggingFaceCheckpoint`.

    Returns:
        None if it can.
    """
    plain = any(".self_attention.linear_q_proj." in name for name in names)
    normed = any(".linear_kv_up_proj.layer_norm_" in name for name in names)
    if NORMALIZES_PLAIN_QUERIES.is_of(version) and plain and normed:
        return f"0.19 {NORMALIZES_PLAIN_QUERIES.what}"
    return None


def _extra_states(source: CheckpointView, names: list[str], of_engine: bool) -> dict[str, Any]:
    fresh = fresh_extra_states(names, of_engine)
    stored = source.states.extra().items()
    return {**fresh, **{name: state for name, state in stored if _stays(name, state, fresh, of_engine)}}


def _stays(name: str, state: Any, fresh: Mapping[str, Any], of_engine: bool) -> bool:
    """Return whether a module of the target spec loads the source's state.

    With Transformer Engine installed, both specs use its norm as the last one (gpt_layer_specs.py).
    """
    return state is not None and (of_engine if name in fresh else name.startswith("decoder.final_"))


def _messages(source: CheckpointView, names: list[str], written: Mapping[str, Any], spec: str) -> list[str]:
    """Return notes for a user of the checkpoint under the other layer spec."""
    source_states = source.states.extra()
    changed = sum(old != new for old, new in zip(source.names(WEIGHT), names, strict=True))
    norms = quantity(changed, "norm has another name", "norms have other names")
    messages = [f"for the layer spec {spec}: {norms}"] if changed else []
    if spec == ENGINE:
        count = sum(source_states.get(name) is None for name in written)
        messages.append(f"{quantity(count, 'extra state')} that the source does not have: empty, as in a fresh model")
    elif scaled := sum(bool(content_of(state)) for name, state in source_states.items() if written.get(name) is None):
        lost = quantity(scaled, "extra state is", "extra states are")
        messages.append(f"{lost} left out, with their fp8 scaling: the local spec has no fp8")
    if source.job.arguments().moe_grouped_gemm and spec != ENGINE:
        messages.append("the local spec has experts one by one: without --moe-grouped-gemm")
    return messages
