"""The only list of formats, a row each.

The first format that recognizes a folder opens it, so a format that could be mistaken for another precedes it.
"""

from __future__ import annotations

import os
from pathlib import Path

from mcore_ckpt_ext.formats.auxiliary_files import COMPANION_PATTERN
from mcore_ckpt_ext.formats.backend import CONFIG_FILE
from mcore_ckpt_ext.formats.canonical.options import Canonical
from mcore_ckpt_ext.formats.format import Format
from mcore_ckpt_ext.formats.fsdp.options import FsdpDtensor
from mcore_ckpt_ext.formats.hugging_face.options import HuggingFace
from mcore_ckpt_ext.formats.legacy.options import Legacy
from mcore_ckpt_ext.formats.target import Target
from mcore_ckpt_ext.formats.torch_dist.options import TorchDist
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.index_entries import METADATA_FILE
from mcore_ckpt_ext.storage.paths import as_path

_HERE = "mcore_ckpt_ext.formats"
FORMATS: tuple[Format, ...] = (
    Format(
        "nemo",
        f"{_HERE}.nemo.reader:NemoCheckpoint",
        takes_facts=True,
        is_loaded_as_stored=True,
        required_files=(CONFIG_FILE, METADATA_FILE),
    ),
    Format(
        "torch_dist",
        f"{_HERE}.torch_dist.reader:TorchDistCheckpoint",
        TorchDist,
        f"{_HERE}.torch_dist.writer:lay_out",
        takes_facts=True,
        is_loaded_as_stored=True,
        required_files=(CONFIG_FILE, METADATA_FILE),
        own_files=(r"\.metadata|metadata\.json|common\.pt|__\d+_\d+\.distcp",),
    ),
    Format(
        "zarr",
        f"{_HERE}.zarr.reader:ZarrCheckpoint",
        takes_facts=True,
        required_files=(CONFIG_FILE,),
        own_files=(r"metadata\.json|common\.pt", r"[^/]+/(\.zarray|\d+(\.\d+)*|shard_\d[\d._]*\.pt)"),
    ),
    Format(
        "legacy",
        f"{_HERE}.legacy.reader:LegacyCheckpoint",
        Legacy,
        f"{_HERE}.legacy.writer:lay_out",
        f"{_HERE}.legacy.target_arguments:reader_arguments",
        is_of_one_layout=True,
        own_files=(r"mp_rank_[\d_]+/(model_optim_rng|model_rng|distrib_optim|optim|layer_wise_optimizer_\d+)\.pt",),
    ),
    Format(
        "peft",
        f"{_HERE}.peft.reader:PeftCheckpoint",
        lister=f"{_HERE}.peft.listing:list_adapters",
        is_adapter_folder=True,
        is_iteration=False,
    ),
    Format(
        "colossalai",
        f"{_HERE}.colossalai.reader:ColossalAICheckpoint",
        lister=f"{_HERE}.colossalai.listing:list_checkpoint",
        is_iteration=False,
    ),
    Format(
        "hf",
        f"{_HERE}.hugging_face.reader:HuggingFaceCheckpoint",
        HuggingFace,
        f"{_HERE}.hugging_face.writer:lay_out",
        lister=f"{_HERE}.hugging_face.listing:list_model",
        is_iteration=False,
        own_files=(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?", COMPANION_PATTERN),
    ),
    Format(
        "canonical",
        f"{_HERE}.canonical.reader:CanonicalCheckpoint",
        Canonical,
        f"{_HERE}.canonical.writer:lay_out",
        is_iteration=False,
        own_files=(r"common\.json|model\.safetensors\.index\.json|canonical-\d+-of-\d+\.safetensors",),
    ),
    Format("verl", f"{_HERE}.verl.reader:VerlCheckpoint", takes_facts=True, is_loaded_as_stored=True),
    Format(
        "fsdp_dtensor",
        f"{_HERE}.fsdp.reader:FsdpCheckpoint",
        FsdpDtensor,
        f"{_HERE}.fsdp.writer:lay_out",
        takes_facts=True,
        is_of_one_layout=True,
        own_files=(r"\.metadata|__\d+_\d+\.distcp",),
    ),
    Format("torch_dcp", f"{_HERE}.torch_dcp.reader:TorchDcpCheckpoint", takes_facts=True),
)


def format_written(target: Target) -> Format:
    """Return the format that options belong to."""
    return next(candidate for candidate in FORMATS if candidate.target is type(target))


def is_adapter_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder that contains adapters without their model."""
    stored = FolderIndex(as_path(path))
    return any(candidate.is_adapter_folder and candidate.recognizes(stored) for candidate in FORMATS)


def format_of(folder: Path, index: FolderIndex | None = None) -> Format | None:
    """Return the format of a folder; None if it is unsupported or unfinished.

    Args:
        folder: the folder.
        index: its index, if it has been used before.
    """
    stored = index or FolderIndex(folder)
    return next((candidate for candidate in FORMATS if candidate.recognizes(stored)), None)
