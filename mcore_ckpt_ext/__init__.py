"""Resume a Megatron-LM checkpoint, optimizer included, under another TP x PP layout.

What is listed here is public, and all else is private. Importing this package costs next to nothing and imports neither
torch nor a framework: torch itself imports it at the end of ``import torch`` (the ``torch.backends`` entry point). So
every public name is looked up when it is first used (PEP 562).
"""

# Nothing is imported here, not even of the standard library: under `python -m` it would come from the current folder.
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
        UnreadableCheckpointError,
        UnsafePickleError,
        UnsupportedCheckpointError,
        UsageError,
    )  # fmt: skip
    from mcore_ckpt_ext.formats.checkpoint import Checkpoint, TensorHandle, open_checkpoint
    from mcore_ckpt_ext.formats.unread import Unread
    from mcore_ckpt_ext.hooks import install, status, uninstall
    from mcore_ckpt_ext.hooks.direct import load_optimizer, save_sidecar
    from mcore_ckpt_ext.hooks.registry import SeamStatus
    from mcore_ckpt_ext.layout.parallel import ParallelLayout
    from mcore_ckpt_ext.loops.facts import Facts
    from mcore_ckpt_ext.offline.beside import Fact
    from mcore_ckpt_ext.offline.comparison import (
        Comparison,
        KindComparison,
        PaddingRows,
        TensorDifference,
        compare,
    )  # fmt: skip
    from mcore_ckpt_ext.offline.conversion import Report, convert
    from mcore_ckpt_ext.offline.difference_map import DifferenceMap
    from mcore_ckpt_ext.offline.findings import Check, Finding, Verification
    from mcore_ckpt_ext.offline.inspection import BufferMap, Inspection, StoredFile, StoredTensor, inspect
    from mcore_ckpt_ext.offline.resumed_settings import Setting
    from mcore_ckpt_ext.offline.stages import Stage
    from mcore_ckpt_ext.offline.verification import verify
    from mcore_ckpt_ext.offline.versions import Evidence, Resumption, Writer
    from mcore_ckpt_ext.targets import Canonical, FsdpDtensor, HuggingFace, Legacy, TorchDist

__version__ = "0.2.0"

__all__ = [
    "BufferMap",
    "Canonical",
    "Check",
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "DestinationError",
    "DifferenceMap",
    "Evidence",
    "Fact",
    "Facts",
    "Finding",
    "FsdpDtensor",
    "HuggingFace",
    "Inspection",
    "KindComparison",
    "Legacy",
    "ModelMismatchError",
    "PackingError",
    "PaddingRows",
    "ParallelLayout",
    "ProofError",
    "Report",
    "ResumeRefusedError",
    "Resumption",
    "SaveFailedError",
    "SeamStatus",
    "Setting",
    "Stage",
    "StoredFile",
    "StoredTensor",
    "TensorDifference",
    "TensorHandle",
    "TorchDist",
    "Unread",
    "UnreadableCheckpointError",
    "UnsafePickleError",
    "UnsupportedCheckpointError",
    "UsageError",
    "Verification",
    "Writer",
    "__version__",
    "compare",
    "convert",
    "inspect",
    "install",
    "load_optimizer",
    "open_checkpoint",
    "save_sidecar",
    "status",
    "uninstall",
    "verify",
]

_HOMES = {
    "BufferMap": "mcore_ckpt_ext.offline.inspection",
    "Canonical": "mcore_ckpt_ext.targets",
    "Check": "mcore_ckpt_ext.offline.findings",
    "Checkpoint": "mcore_ckpt_ext.formats.checkpoint",
    "CheckpointError": "mcore_ckpt_ext.errors",
    "Comparison": "mcore_ckpt_ext.offline.comparison",
    "DestinationError": "mcore_ckpt_ext.errors",
    "DifferenceMap": "mcore_ckpt_ext.offline.difference_map",
    "Evidence": "mcore_ckpt_ext.offline.versions",
    "Fact": "mcore_ckpt_ext.offline.beside",
    "Setting": "mcore_ckpt_ext.offline.resumed_settings",
    "Facts": "mcore_ckpt_ext.loops.facts",
    "Finding": "mcore_ckpt_ext.offline.findings",
    "FsdpDtensor": "mcore_ckpt_ext.targets",
    "HuggingFace": "mcore_ckpt_ext.targets",
    "Inspection": "mcore_ckpt_ext.offline.inspection",
    "KindComparison": "mcore_ckpt_ext.offline.comparison",
    "Legacy": "mcore_ckpt_ext.targets",
    "ModelMismatchError": "mcore_ckpt_ext.errors",
    "PackingError": "mcore_ckpt_ext.errors",
    "PaddingRows": "mcore_ckpt_ext.offline.comparison",
    "ParallelLayout": "mcore_ckpt_ext.layout.parallel",
    "ProofError": "mcore_ckpt_ext.errors",
    "Report": "mcore_ckpt_ext.offline.conversion",
    "ResumeRefusedError": "mcore_ckpt_ext.errors",
    "Resumption": "mcore_ckpt_ext.offline.versions",
    "SaveFailedError": "mcore_ckpt_ext.errors",
    "SeamStatus": "mcore_ckpt_ext.hooks.registry",
    "Stage": "mcore_ckpt_ext.offline.stages",
    "StoredFile": "mcore_ckpt_ext.offline.inspection",
    "StoredTensor": "mcore_ckpt_ext.offline.inspection",
    "TensorDifference": "mcore_ckpt_ext.offline.comparison",
    "TensorHandle": "mcore_ckpt_ext.formats.checkpoint",
    "TorchDist": "mcore_ckpt_ext.targets",
    "Unread": "mcore_ckpt_ext.formats.unread",
    "UnreadableCheckpointError": "mcore_ckpt_ext.errors",
    "UnsafePickleError": "mcore_ckpt_ext.errors",
    "UnsupportedCheckpointError": "mcore_ckpt_ext.errors",
    "UsageError": "mcore_ckpt_ext.errors",
    "Verification": "mcore_ckpt_ext.offline.findings",
    "Writer": "mcore_ckpt_ext.offline.versions",
    "compare": "mcore_ckpt_ext.offline.comparison",
    "convert": "mcore_ckpt_ext.offline.conversion",
    "inspect": "mcore_ckpt_ext.offline.inspection",
    "install": "mcore_ckpt_ext.hooks",
    "load_optimizer": "mcore_ckpt_ext.hooks.direct",
    "open_checkpoint": "mcore_ckpt_ext.formats.checkpoint",
    "save_sidecar": "mcore_ckpt_ext.hooks.direct",
    "status": "mcore_ckpt_ext.hooks",
    "uninstall": "mcore_ckpt_ext.hooks",
    "verify": "mcore_ckpt_ext.offline.verification",
}


def __getattr__(name: str) -> object:
    """Import the module that holds a public name, on the first use of that name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names beside those that are already there."""
    return sorted({*globals(), *__all__})
