"""Presents any checkpoint to a job of Megatron-FSDP, as if converted to `fsdp_dtensor`."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, ClassVar

from typing_extensions import override

from mcore_ckpt_ext.errors import ModelMismatchError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.fsdp.names import GROUPS, MODEL, ModuleNames
from mcore_ckpt_ext.formats.fsdp.options import FsdpDtensor
from mcore_ckpt_ext.formats.fsdp.writer import FsdpArray, FsdpTarget
from mcore_ckpt_ext.formats.plain_dcp import FSDP_DTENSOR
from mcore_ckpt_ext.formats.target import LayerSpec
from mcore_ckpt_ext.job.differences import SAME_MODEL
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.sources.dcp_storage_adapter import STEPS, DcpStorageAdapter
from mcore_ckpt_ext.operations.sources import open_source


class MegatronFsdpAdapter(DcpStorageAdapter):
    """One checkpoint for one load of Megatron-FSDP."""

    backend: ClassVar[str] = FSDP_DTENSOR
    whose: ClassVar[str] = "Megatron-FSDP"
    exact: ClassVar[str] = (
        "keep masters and moments in fp32 (--megatron-fsdp-main-params-dtype fp32, --exp-avg-dtype fp32, "
        "--exp-avg-sq-dtype fp32)"
    )

    def __init__(self, session: LoadSession, arguments: Any) -> None:
        folder = session.folder
        running = JobArguments.of(vars(arguments))
        if (running.pipeline_model_parallel_size or 1) > 1:
            raise UnsupportedCheckpointError(
                "the layer numbers of Megatron-FSDP's pipeline stages are unknown",
                found=f"--pipeline-model-parallel-size {running.pipeline_model_parallel_size}",
                expected="1",
                where=str(folder),
                hint="resume without pipeline stages",
            )
        spec: LayerSpec = "local" if running.transformer_impl == "local" else "transformer_engine"
        source = open_source(folder, FsdpDtensor(transformer_impl=spec), None, index=session.index)
        super().__init__(session, source, running)
        has_expert_optimizer = ParallelLayout.from_arguments(running).separates_experts
        # The checkpoint under the names of the running job.
        self._target = FsdpTarget(self.checkpoint, megatron_version(), has_expert_optimizer, ModuleNames(running))
        self.arguments = self._target.common["args"]

    @override
    def complete(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: Megatron-FSDP requests every key itself."""

    @override
    def arrays(self) -> Mapping[str, FsdpArray]:
        return {array.key: array for array in self._target.arrays()}

    @override
    def objects(self) -> Mapping[str, Any]:
        return dict(self._target.objects())

    @override
    def is_wanted(self, key: str, *, is_tensor: bool) -> bool:
        return is_tensor or key == STEPS or (key.startswith(GROUPS) and key.endswith(".step"))

    @override
    def check_used(self, arrays: Mapping[str, FsdpArray], every: Set[str]) -> None:
        unused = [key for key in arrays if key.startswith(MODEL) and key not in every]
        if unused:
            raise ModelMismatchError(
                "the checkpoint holds parameters that the model does not have",
                found=f"{len(unused)} of them, {', '.join(unused[:3])}",
                where=str(self._folder),
                hint=SAME_MODEL,
            )
