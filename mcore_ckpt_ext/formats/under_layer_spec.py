"""A checkpoint as a job of the other layer spec would have written it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.formats.expert_states import content_of
from mcore_ckpt_ext.formats.fresh_states import fresh_extra_states
from mcore_ckpt_ext.formats.huggingface import NORM_IN_QUERY
from mcore_ckpt_ext.formats.respelled import Respelled
from mcore_ckpt_ext.model_space.layer_spec import names_under_spec
from mcore_ckpt_ext.model_space.tensors import WEIGHT

ENGINE, LOCAL = "transformer_engine", "local"


class UnderLayerSpec(Respelled):
    """A checkpoint as a job of the other layer spec would have written it, but for what its own alone has.

    Extra states that the source lacks are those of a fresh model; linears of the local spec keep none.
    """

    def __init__(self, source: Checkpoint, spec: str) -> None:
        """`spec`: the layer spec of the job that will read it.

        Raises:
            UnsupportedCheckpointError: a layer is of a kind that only one of the two specs has.
        """
        self._spec = spec
        own = source.arguments.transformer_impl
        if own not in (ENGINE, LOCAL, None):
            raise UnsupportedCheckpointError(
                "it is not known how the other layer specs hold the layers of this one", found=own,
                expected=f"{ENGINE} or {LOCAL}", where=str(source.folder),
                helps="keep the layer spec: leave --transformer-impl out",
            )  # fmt: skip
        super().__init__(source, names_under_spec(source.names(WEIGHT), self._of_engine))

    def unbuildable(self, version: tuple[int, int]) -> str | None:
        """Why a version of Megatron has no such model; None where it has (see `HuggingFaceCheckpoint.unbuildable`)."""
        names = self.names(WEIGHT)
        plain = any(".self_attention.linear_q_proj." in name for name in names)
        normed = any(".linear_kv_up_proj.layer_norm_" in name for name in names)
        if version == NORM_IN_QUERY and plain and normed:
            return "0.19 fuses a norm into linear_q_proj, which a model without compressed queries does not have"
        return None

    @property
    def _of_engine(self) -> bool:
        return self._spec == ENGINE

    @cached_property
    @override
    def arguments(self) -> JobArguments:
        # Grouped experts are Transformer Engine's; those of the local spec are one transposed matrix.
        grouped = bool(self._source.arguments.moe_grouped_gemm) and self._of_engine
        return self._source.arguments.changed(transformer_impl=self._spec, moe_grouped_gemm=grouped)

    @override
    def extra_states(self) -> Mapping[str, Any]:
        fresh = fresh_extra_states(self.names(WEIGHT), self._of_engine)
        kept = {name: state for name, state in self._source.extra_states().items() if self._stays(name, state, fresh)}
        return fresh | kept

    def _stays(self, name: str, state: Any, fresh: Mapping[str, Any]) -> bool:
        """Whether a module of this spec takes the state that the source has for it.

        The last norm is Transformer Engine's in both, where it is installed (gpt_layer_specs.py).
        """
        return state is not None and (self._of_engine if name in fresh else name.startswith("decoder.final_"))

    @override
    def notices(self) -> list[str]:
        own, written = self._source.extra_states(), self.extra_states()
        renamed = sum(old != new for old, new in zip(self._source.names(WEIGHT), self.names(WEIGHT), strict=True))
        found = [f"for the layer spec {self._spec}: {renamed} norms have other names"] if renamed else []
        if self._of_engine:
            count = sum(own.get(name) is None for name in written)
            found.append(f"{count} extra states that the source does not have start empty, as in a fresh model")
        elif scaled := sum(bool(content_of(state)) for name, state in own.items() if written.get(name) is None):
            found.append(f"{scaled} extra states are left out, with their fp8 scaling: the local spec has no fp8")
        if self._source.arguments.moe_grouped_gemm and not self.arguments.moe_grouped_gemm:
            found.append("the local spec has experts one by one: without --moe-grouped-gemm")
        return [*super().notices(), *found]
