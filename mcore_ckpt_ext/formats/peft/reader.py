"""Reads a PEFT folder: adapters in model space as Megatron-Bridge stores them.

The model that they belong to is in another folder.

Sources: `LoraConfig` (tuners/lora/config.py), `save_pretrained` (peft_model.py, utils/save_and_load.py); peft 0.21.2.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path, PurePath
from typing import Any, ClassVar

from typing_extensions import override

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError, join_some, shorten
from mcore_ckpt_ext.families.adapter_config import contradictions, strange_values
from mcore_ckpt_ext.families.adapters import MAGNITUDES, Adapters, linears_of
from mcore_ckpt_ext.families.adapters_read import adapters_read, bridge_peft
from mcore_ckpt_ext.families.bridge import run_config
from mcore_ckpt_ext.families.gpt2 import GPT2
from mcore_ckpt_ext.families.recognition import Fit
from mcore_ckpt_ext.formats.adapter_only import fit_of_adapters
from mcore_ckpt_ext.formats.adapter_scaling import scaling_of
from mcore_ckpt_ext.formats.hugging_face.folder import (
    ADAPTER,
    StoredTensor,
    adapters_without_model,
    is_peft,
    tensors_of,
)
from mcore_ckpt_ext.formats.hugging_face.weights import ModelSpaceWeights
from mcore_ckpt_ext.formats.hugging_face.weights_only import WeightsAlone
from mcore_ckpt_ext.formats.open_options import DEFAULT_OPTIONS, OpenOptions
from mcore_ckpt_ext.formats.parts import Files
from mcore_ckpt_ext.formats.peft.listing import ADAPTER_FILES
from mcore_ckpt_ext.formats.view import CheckpointView, Composition, OpenedFormat
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.json_text import read_json

NAME = "peft"
# Keys that select the linears with adapters (the tensors are compared with these), or that only document the training.
_WITHOUT_EFFECT = {
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "r",
    "lora_dropout",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "auto_mapping",
    "peft_version",
    "peft_type",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
    "runtime_config",
    "ensure_weight_tying",
    "init_lora_weights",
    "bias",
}
_VALUES: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    # Other initializations also change the base (`reset_lora_parameters`, tuners/lora/layer.py).
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_ALPHA = 8  # peft's default (`LoraConfig`)
_LAYER = re.compile(r"layers\.\d+\.", re.ASCII)
_LAYOUT = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor", "context", "data")


class PeftCheckpoint(WeightsAlone):
    """A folder of adapters that `peft` loads into a model."""

    name = NAME
    kind: ClassVar[str] = "a PEFT folder"

    @classmethod
    @override
    def recognizes(cls, stored: FolderIndex) -> bool:
        return is_peft(stored.folder)

    def __init__(self, folder: Path, options: OpenOptions = DEFAULT_OPTIONS) -> None:
        """Read the configuration, the header, and whether linears share their `lora_A`.

        Args:
            folder: the folder.
            options: see `FormatReader`; of the model, only its description is used.

        Raises:
            UnreadableCheckpointError: a file is missing or damaged.
            UnsupportedCheckpointError: no model is named, or Megatron-Bridge does not support these adapters.
        """
        if options.model is None:
            raise adapters_without_model(folder)
        super().__init__(folder, options)
        self._base = options.model.files.folder
        self.config = read_json(folder / ADAPTER)
        self._check_config()
        self._fit: Fit = fit_of_adapters(options.model, options.family, {})
        if isinstance(self._fit.family, GPT2):
            # Only Conv1D uses the key; peft ignores it for other linears (`dispatch_default`, lora/layer.py).
            raise UnsupportedCheckpointError(
                "adapters of GPT-2, whose matrices are transposed, are not supported",
                found="fan_in_fan_out",
                where=str(folder / ADAPTER),
                hint="merge them first: PeftModel.merge_and_unload(), then save_pretrained",
            )
        stored = self._stored_tensors()
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        self._of_model = self._fit.family.tensors(self._fit.arguments)
        adapters, self._shapes = adapters_read(
            self._of_model, shapes, lambda names: len({self._digest(stored[name]) for name in names}) == 1
        )
        self._adapters: Adapters = adapters
        self._check_tensors(stored, shapes)
        self._weights = ModelSpaceWeights([(tensor, stored[tensor.name]) for tensor in self._once(stored)])

    @cached_property
    @override
    def view(self) -> CheckpointView:
        return replace(super().view, composition=Composition(merge_notes=self._other_base()))

    @cached_property
    @override
    def format(self) -> OpenedFormat:
        return replace(
            super().format,
            notices=self._notices,
            run_config=self._run_config,
            conversion="mcore-ckpt convert SRC DST --to torch_dist --for bridge --weights MODEL",
        )

    @cached_property
    @override
    def files(self) -> Files:
        return replace(super().files, auxiliary_files=dict)

    def _check_config(self) -> None:
        other = {key: value for key, value in self.config.items() if key not in _WITHOUT_EFFECT and value}
        other |= {
            key: self.config.get(key) for key, supported in _VALUES.items() if self.config.get(key) not in supported
        }
        other |= strange_values(self.config)
        if other:
            raise UnsupportedCheckpointError(
                "adapters of this kind are not supported in Megatron",
                found=", ".join(f"{key}: {shorten(repr(value), 40)}" for key, value in sorted(other.items())),
                expected="LoRA or DoRA of linears",
                where=str(self.folder / ADAPTER),
                hint="merge them first: PeftModel.merge_and_unload(), then save_pretrained",
            )

    def _check_tensors(self, stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        # transformers' models have no MTP layers.
        linears = [
            tensor.name.removesuffix(".weight")
            for name, ours in linears_of(self._of_model).items()
            for tensor in ours
            if not name.startswith("mtp.")
        ]
        mismatches = [*contradictions(self.config, shapes, linears)]
        mismatches += [
            f"{name}: {tensor.extent.dtype}" for name, tensor in stored.items() if tensor.extent.dtype not in _DTYPES
        ]
        if mismatches:
            raise UnsupportedCheckpointError(
                f"the tensors do not match {ADAPTER}",
                found=join_some(mismatches, 4),
                expected="the tensors that peft would create from that file for this model",
                where=str(self.folder),
                hint="pass the model that they were trained for: --weights FOLDER; or correct the file, which peft "
                "reads differently",
            )

    def _stored_tensors(self) -> dict[str, StoredTensor]:
        file = next((name for name in ADAPTER_FILES if (self.folder / name).is_file()), None)
        if file is None:
            raise UnreadableCheckpointError(
                "the folder contains no adapters", expected=" or ".join(ADAPTER_FILES), where=str(self.folder)
            )
        end = f".{MAGNITUDES}.weight"  # the name in peft before 0.10
        return {
            name.removesuffix(".weight") if name.endswith(end) else name: tensor
            for name, tensor in tensors_of(self.files.reader, file)
        }

    def _digest(self, tensor: StoredTensor) -> bytes:
        place = self.files.transfer.locate(tensor.extent)
        size = prod(tensor.shape) * place.dtype.itemsize
        first = place.offset + tensor.first * place.dtype.itemsize
        return hashlib.sha256(self.files.reader.read(place.file, first, size)).digest() + str(place.dtype).encode()

    def _once(self, stored: Mapping[str, StoredTensor]) -> Iterator[Any]:
        """Yield tensors after a check of their shapes, one for each adapter tensor of Megatron-Bridge."""
        seen = set()
        for tensor in self._adapters.tensors:
            if stored[tensor.name].shape != tensor.shape:
                raise UnreadableCheckpointError(
                    "an adapter does not have the shape of its linear",
                    found=str(stored[tensor.name].shape),
                    expected=str(tensor.shape),
                    where=tensor.name,
                    hint="pass the model that the adapters are for",
                )
            if tensor.regions not in seen:
                yield tensor
            seen.add(tensor.regions)

    @override
    def _read_common(self) -> dict[str, Any]:
        """Return the common state of a release checkpoint with this model and its adapters."""
        arguments = {
            **self._fit.arguments.as_dict(),
            **{f"{name}_parallel_size": 1 for name in _LAYOUT},
            "virtual_pipeline_model_parallel_size": None,
            "world_size": 1,
            "iteration": 0,
            "consumed_train_samples": 0,
            "lora_alpha": self.config.get("lora_alpha", _ALPHA),
            "lora_dropout": self.config.get("lora_dropout"),
            "use_rslora": bool(self.config.get("use_rslora")),
        }
        return {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 0}

    def _run_config(self) -> str:
        """Return Megatron-Bridge's `run_config.yaml` for a checkpoint of these adapters.

        Raises:
            UnsupportedCheckpointError: Megatron-Bridge does not support them.
        """
        scaling = scaling_of(self.view, None)
        if scaling.by_root:
            raise UnsupportedCheckpointError(
                "Megatron-Bridge divides alpha by the rank, not by its root",
                found="use_rslora: true",
                where=str(self.folder / ADAPTER),
                hint="merge them into their model: --merge FOLDER --to hf",
            )
        names = self._weights.names()
        peft = bridge_peft(self._of_model, names, self._adapters.rank, scaling.alpha, scaling.dropout)
        if without := self._names_without_adapters(names):
            raise UnsupportedCheckpointError(
                "Megatron-Bridge puts adapters into a linear of every layer, or of none",
                where=str(self.folder),
                found=f"none in {join_some(without, 2)}, and some in other layers",
                hint="merge them into their model: --merge FOLDER --to hf",
            )
        return run_config(self._fit.family, self._fit.arguments, peft=peft)

    def _names_without_adapters(self, names: Sequence[str]) -> list[str]:
        """Return the linears without adapters whose counterparts in other layers have adapters."""
        have = {name.partition(".adapter.")[0] for name in names}
        kinds = {_LAYER.sub("layers.", name) for name in have}
        linears = (name for name in linears_of(self._of_model) if not name.startswith("mtp."))
        return sorted(name for name in linears if _LAYER.sub("layers.", name) in kinds and name not in have)

    def _notices(self, view: CheckpointView) -> list[str]:
        adapters = f"adapters for the {self._fit.family.name} that was named, whose weights are not among them"
        return [adapters, *self._other_base()]

    def _other_base(self) -> list[str]:
        """Return a note if the adapters name a model of another name than the folder that was named."""
        base = self.config.get("base_model_name_or_path")
        if not base or PurePath(str(base)).name == self._base.name:
            return []
        return [f"the adapters say that they were trained for {shorten(str(base))}, and {self._base} was named"]
