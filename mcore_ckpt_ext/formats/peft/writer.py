"""Writes a PEFT folder as `save_pretrained` of peft 0.21 does.

Files: `adapter_model.safetensors` and `adapter_config.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UsageError, join_some, with_indefinite_article
from mcore_ckpt_ext.families.family import Family, HuggingFaceTensor
from mcore_ckpt_ext.families.passed_arguments import replaced_values
from mcore_ckpt_ext.families.recognition import Fit
from mcore_ckpt_ext.formats.adapter_only import adapters_in, fit_of_adapters
from mcore_ckpt_ext.formats.adapter_order import about_norms
from mcore_ckpt_ext.formats.adapter_scaling import scaling_of
from mcore_ckpt_ext.formats.hugging_face.options import HuggingFace
from mcore_ckpt_ext.formats.laid_out import OutputPlan
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.assignments import parse_assignments
from mcore_ckpt_ext.model_space.adapters import is_adapter
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.plan import TargetSlice, named_tensor
from mcore_ckpt_ext.planning.write_plan import Output, Record, WriteItem
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.json_text import json_file, read_json
from mcore_ckpt_ext.storage.safetensors import Declared, lay_out_checked_file, list_arrays

CONFIG = "adapter_config.json"
MODEL = "adapter_model.safetensors"


class PeftTarget:
    """Lays out a folder with a checkpoint's adapters, but without their model."""

    def __init__(self, checkpoint: CheckpointView, options: HuggingFace, family: Family | None) -> None:
        """Raise UnsupportedCheckpointError if the model's family, or the weight of an adapter, is unknown."""
        self._checkpoint = checkpoint
        self._check_options(options)
        self.left_out = [name for name in checkpoint.names(WEIGHT) if not is_adapter(name)]
        passed = parse_assignments(options.arguments)
        self.fit: Fit = fit_of_adapters(checkpoint, family, passed)
        self._replaced = replaced_values(checkpoint.job.arguments(), passed)
        self._adapters = adapters_in(checkpoint, self.fit)
        self._scaling = scaling_of(checkpoint, options.lora_alpha)

    @staticmethod
    def _check_options(options: HuggingFace) -> None:
        given: dict[str, object] = {"dtype": options.dtype, "quantize": options.quantize, "bin": options.pickled}
        given |= {"tokenizer": options.tokenizer, "from": options.kind != WEIGHT}
        if named := [name for name, value in given.items() if value]:
            raise UsageError(
                f"--{named[0]} has no meaning for adapters",
                expected="they are written as they are stored",
                hint="leave it out",
            )

    def output(self) -> Output:
        """Plan both files, and the location of each tensor."""
        declared = [Declared(tensor.name, tensor.shape, self._dtype(tensor)) for tensor in self._adapters.tensors]
        file, starts, checksums = lay_out_checked_file(MODEL, declared)
        records = [
            Record(MODEL, start, array.dtype, prod(array.shape), self._content(tensor), checksum_texts=(checksum,))
            for tensor, array, start, checksum in zip(self._adapters.tensors, declared, starts, checksums, strict=True)
        ]
        return Output([file, json_file(CONFIG, self._config(), last=True)], records, tuple(self._notes()))

    def _dtype(self, tensor: HuggingFaceTensor) -> str:
        return named_tensor(self._checkpoint, WEIGHT, tensor.regions[0].name).dtype

    def _content(self, tensor: HuggingFaceTensor) -> tuple[WriteItem, ...]:
        name = tensor.regions[0].name
        source = named_tensor(self._checkpoint, WEIGHT, name)
        return (WriteItem(0, TargetSlice(WEIGHT, Slice.whole(tensor.regions), {name: source})),)

    def _config(self) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "inference_mode": True,
            "r": self._adapters.rank,
            "lora_alpha": self._scaling.alpha,
            "lora_dropout": self._scaling.dropout,
            "bias": "none",
            "target_modules": sorted(self._adapters.targets),
            "use_dora": self._adapters.has_magnitudes,
            "use_rslora": self._scaling.by_root,
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": None,
        }

    def _notes(self) -> Iterator[str]:
        yield from self._replaced
        yield f"adapters for {with_indefinite_article(self.fit.family.name)}, which peft loads onto the model"
        yield from about_norms(self._checkpoint, "peft, which has whole norms, computes")
        if self.left_out:
            yield f"left out: the model itself, {join_some(self.left_out, 2)}"

    def read_back(self, folder: Path) -> CheckpointView:
        """Check that the files of a written folder are complete, and return the source."""
        list_arrays(FolderReader(folder), MODEL)
        read_json(folder / CONFIG)
        return self._checkpoint


def lay_out(checkpoint: CheckpointView, target: HuggingFace, family: Family | None) -> OutputPlan:
    """Lay out the folder of a checkpoint's adapters.

    Raises:
        UnsupportedCheckpointError: peft does not support the adapters.
        UsageError: an option does not apply to adapters.
    """
    adapters = PeftTarget(checkpoint, target, family)
    return OutputPlan(adapters.output(), "", (), adapters.left_out, False, adapters.read_back)
