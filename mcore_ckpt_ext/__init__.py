"""Resume a Megatron-LM checkpoint, optimizer included, under another TP x PP layout.

Only the names listed here are public. Importing this package costs next to nothing and imports neither torch nor a
framework, because torch itself imports it at the end of ``import torch`` (the ``torch.backends`` entry point). Each
public name is therefore looked up when it is first used (PEP 562).
"""

# Import nothing here, not even the standard library: under `python -m`, modules come from the current folder.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from mcore_ckpt_ext.errors import (
        CheckpointError,
        DestinationError,
        ModelMismatchError,
        PackingError,
        ProofError,
        ResumeRefusedError,
        SaveFailedError,
        StorageError,
        UnknownNameError,
        UnreadableCheckpointError,
        UnsafePickleError,
        UnsupportedCheckpointError,
        UsageError,
    )
    from mcore_ckpt_ext.formats.canonical.options import Canonical
    from mcore_ckpt_ext.formats.checkpoint import Checkpoint, TensorHandle, open_checkpoint
    from mcore_ckpt_ext.formats.fsdp.options import FsdpDtensor
    from mcore_ckpt_ext.formats.hugging_face.options import HuggingFace
    from mcore_ckpt_ext.formats.legacy.options import Legacy
    from mcore_ckpt_ext.formats.torch_dist.options import TorchDist
    from mcore_ckpt_ext.formats.unread_state import UnreadState
    from mcore_ckpt_ext.job.facts import Facts
    from mcore_ckpt_ext.layout.parallel import ParallelLayout
    from mcore_ckpt_ext.layout_choice.memory import Memory
    from mcore_ckpt_ext.megatron.api import load_optimizer, save_sidecar
    from mcore_ckpt_ext.megatron.installation import install, status, uninstall
    from mcore_ckpt_ext.model_space.slices import Region
    from mcore_ckpt_ext.operations.comparison import compare
    from mcore_ckpt_ext.operations.comparison_result import Comparison, KindComparison, PaddingRows, TensorDifference
    from mcore_ckpt_ext.operations.conversion import Report, convert
    from mcore_ckpt_ext.operations.difference_map import DifferenceMap
    from mcore_ckpt_ext.operations.elastic_layout import ChosenLayout, choose_layout
    from mcore_ckpt_ext.operations.findings import Check, Finding, Verification
    from mcore_ckpt_ext.operations.inspection import inspect
    from mcore_ckpt_ext.operations.inspection_result import BufferMap, Inspection, StoredFile, StoredTensor
    from mcore_ckpt_ext.operations.layout_plan import LayoutPlan, PlannedLayout, plan
    from mcore_ckpt_ext.operations.metadata_comparison import MetadataComparison
    from mcore_ckpt_ext.operations.options import (
        ComparisonOptions,
        ConversionOptions,
        PlanOptions,
        VerificationOptions,
    )
    from mcore_ckpt_ext.operations.pipeline_map import Stage
    from mcore_ckpt_ext.operations.resumed_settings import Setting
    from mcore_ckpt_ext.operations.resumptions import Evidence, Resumption, Writer
    from mcore_ckpt_ext.operations.verification import verify
    from mcore_ckpt_ext.patching.patch_point import PatchPointStatus

__version__ = "0.2.0"

__all__ = [
    "BufferMap",
    "Canonical",
    "Check",
    "Checkpoint",
    "CheckpointError",
    "ChosenLayout",
    "Comparison",
    "ComparisonOptions",
    "ConversionOptions",
    "DestinationError",
    "DifferenceMap",
    "Evidence",
    "MetadataComparison",
    "Facts",
    "Finding",
    "FsdpDtensor",
    "HuggingFace",
    "Inspection",
    "KindComparison",
    "LayoutPlan",
    "Legacy",
    "Memory",
    "ModelMismatchError",
    "PackingError",
    "PaddingRows",
    "ParallelLayout",
    "PlanOptions",
    "PlannedLayout",
    "ProofError",
    "Region",
    "Report",
    "ResumeRefusedError",
    "Resumption",
    "SaveFailedError",
    "PatchPointStatus",
    "Setting",
    "Stage",
    "StorageError",
    "StoredFile",
    "StoredTensor",
    "TensorDifference",
    "TensorHandle",
    "TorchDist",
    "UnknownNameError",
    "UnreadState",
    "UnreadableCheckpointError",
    "UnsafePickleError",
    "UnsupportedCheckpointError",
    "UsageError",
    "Verification",
    "VerificationOptions",
    "Writer",
    "__version__",
    "choose_layout",
    "compare",
    "convert",
    "inspect",
    "install",
    "load_optimizer",
    "open_checkpoint",
    "plan",
    "save_sidecar",
    "status",
    "uninstall",
    "verify",
]

_MODULES = {
    "BufferMap": "mcore_ckpt_ext.operations.inspection_result",
    "Canonical": "mcore_ckpt_ext.formats.canonical.options",
    "Check": "mcore_ckpt_ext.operations.findings",
    "Checkpoint": "mcore_ckpt_ext.formats.checkpoint",
    "CheckpointError": "mcore_ckpt_ext.errors",
    "ChosenLayout": "mcore_ckpt_ext.operations.elastic_layout",
    "Comparison": "mcore_ckpt_ext.operations.comparison_result",
    "ComparisonOptions": "mcore_ckpt_ext.operations.options",
    "ConversionOptions": "mcore_ckpt_ext.operations.options",
    "PlanOptions": "mcore_ckpt_ext.operations.options",
    "VerificationOptions": "mcore_ckpt_ext.operations.options",
    "DestinationError": "mcore_ckpt_ext.errors",
    "DifferenceMap": "mcore_ckpt_ext.operations.difference_map",
    "Evidence": "mcore_ckpt_ext.operations.resumptions",
    "MetadataComparison": "mcore_ckpt_ext.operations.metadata_comparison",
    "Setting": "mcore_ckpt_ext.operations.resumed_settings",
    "Facts": "mcore_ckpt_ext.job.facts",
    "Finding": "mcore_ckpt_ext.operations.findings",
    "FsdpDtensor": "mcore_ckpt_ext.formats.fsdp.options",
    "HuggingFace": "mcore_ckpt_ext.formats.hugging_face.options",
    "Inspection": "mcore_ckpt_ext.operations.inspection_result",
    "KindComparison": "mcore_ckpt_ext.operations.comparison_result",
    "LayoutPlan": "mcore_ckpt_ext.operations.layout_plan",
    "Legacy": "mcore_ckpt_ext.formats.legacy.options",
    "Memory": "mcore_ckpt_ext.layout_choice.memory",
    "ModelMismatchError": "mcore_ckpt_ext.errors",
    "PackingError": "mcore_ckpt_ext.errors",
    "PaddingRows": "mcore_ckpt_ext.operations.comparison_result",
    "ParallelLayout": "mcore_ckpt_ext.layout.parallel",
    "PlannedLayout": "mcore_ckpt_ext.operations.layout_plan",
    "ProofError": "mcore_ckpt_ext.errors",
    "Region": "mcore_ckpt_ext.model_space.slices",
    "UnknownNameError": "mcore_ckpt_ext.errors",
    "Report": "mcore_ckpt_ext.operations.conversion",
    "ResumeRefusedError": "mcore_ckpt_ext.errors",
    "Resumption": "mcore_ckpt_ext.operations.resumptions",
    "SaveFailedError": "mcore_ckpt_ext.errors",
    "PatchPointStatus": "mcore_ckpt_ext.patching.patch_point",
    "Stage": "mcore_ckpt_ext.operations.pipeline_map",
    "StorageError": "mcore_ckpt_ext.errors",
    "StoredFile": "mcore_ckpt_ext.operations.inspection_result",
    "StoredTensor": "mcore_ckpt_ext.operations.inspection_result",
    "TensorDifference": "mcore_ckpt_ext.operations.comparison_result",
    "TensorHandle": "mcore_ckpt_ext.formats.checkpoint",
    "TorchDist": "mcore_ckpt_ext.formats.torch_dist.options",
    "UnreadState": "mcore_ckpt_ext.formats.unread_state",
    "UnreadableCheckpointError": "mcore_ckpt_ext.errors",
    "UnsafePickleError": "mcore_ckpt_ext.errors",
    "UnsupportedCheckpointError": "mcore_ckpt_ext.errors",
    "UsageError": "mcore_ckpt_ext.errors",
    "Verification": "mcore_ckpt_ext.operations.findings",
    "Writer": "mcore_ckpt_ext.operations.resumptions",
    "choose_layout": "mcore_ckpt_ext.operations.elastic_layout",
    "compare": "mcore_ckpt_ext.operations.comparison",
    "convert": "mcore_ckpt_ext.operations.conversion",
    "inspect": "mcore_ckpt_ext.operations.inspection",
    "install": "mcore_ckpt_ext.megatron.installation",
    "load_optimizer": "mcore_ckpt_ext.megatron.api",
    "open_checkpoint": "mcore_ckpt_ext.formats.checkpoint",
    "plan": "mcore_ckpt_ext.operations.layout_plan",
    "save_sidecar": "mcore_ckpt_ext.megatron.api",
    "status": "mcore_ckpt_ext.megatron.installation",
    "uninstall": "mcore_ckpt_ext.megatron.installation",
    "verify": "mcore_ckpt_ext.operations.verification",
}


def __getattr__(name: str) -> object:
    """Import the module that holds a public name, on the first use of that name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names and the names that exist already."""
    return sorted({*globals(), *__all__})
