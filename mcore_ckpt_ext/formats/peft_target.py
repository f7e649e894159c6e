"""Writing a PEFT folder: `adapter_model.safetensors`, `adapter_config.json`, as `save_pretrained` of peft 0.21 does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError, some, with_article
from mcore_ckpt_ext.families.adapters import Adapters, adapters_of
from mcore_ckpt_ext.families.arguments import complete
from mcore_ckpt_ext.families.family import Family, HuggingFaceTensor
from mcore_ckpt_ext.families.recognition import Fit, family_of_megatron
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.formats.description import run_config_of
from mcore_ckpt_ext.model_space.adapters import is_adapter
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.output import Output, Placed, Record
from mcore_ckpt_ext.planning.plan import WantedSlice
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.safetensors import Declared, json_file, lay_out_file, read_header, read_json
from mcore_ckpt_ext.targets import HuggingFace

CONFIG, MODEL = "adapter_config.json", "adapter_model.safetensors"


class PeftTarget:
    """Lays out the folder of a checkpoint's adapters; a model that they are stored beside is left out."""

    def __init__(self, checkpoint: Checkpoint, options: HuggingFace, family: Family | None) -> None:
        """Raises: UnsupportedCheckpointError, when the model or an adapter is of a kind that is not known."""
        self._checkpoint = checkpoint
        self._check_options(options)
        names = checkpoint.names(WEIGHT)
        self._own = [name for name in names if is_adapter(name)]
        self.left_out = [name for name in names if not is_adapter(name)]
        where = str(checkpoint.folder)
        stated = options.stated_arguments()
        known = checkpoint.arguments
        model = complete(known.changed(source=where, **stated) if stated else known)
        tokens = options.vocab_size or checkpoint.vocabulary or checkpoint.vocabulary_rows
        model = replace(model, vocab_size=tokens or 1)  # no adapter depends on it
        self.fit: Fit = family_of_megatron(model, self.left_out or None, family, None, where)
        shapes = {name: checkpoint.named_tensor(WEIGHT, name).shape for name in self._own}
        ranks = None if "tensor" in checkpoint.layout.unknown else checkpoint.layout.tensor
        self._adapters: Adapters = adapters_of(self.fit.family.tensors(self.fit.arguments), shapes, ranks)
        self._alpha, self._dropout = self._scaling(options)

    @staticmethod
    def _check_options(options: HuggingFace) -> None:
        given: dict[str, object] = {"dtype": options.dtype, "quantize": options.quantize, "bin": options.pickled}
        given |= {"tokenizer": options.tokenizer, "from": options.kind != WEIGHT}
        if named := [name for name, value in given.items() if value]:
            raise UsageError(
                f"--{named[0]} has no meaning for adapters", expected="they are written as they are stored",
                helps="leave it out",
            )  # fmt: skip

    def _scaling(self, options: HuggingFace) -> tuple[float, float]:
        """The factor `lora_alpha`, and the dropout that they were trained with."""
        told: Mapping[str, Any] = (run_config_of(self._checkpoint.folder) or {}).get("peft") or {}
        args = self._checkpoint.arguments.stated
        alpha = options.lora_alpha or told.get("alpha") or args.get("lora_alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            raise UnsupportedCheckpointError(
                "it is not known by what the adapters are multiplied", found="no alpha beside the checkpoint",
                where=str(self._checkpoint.folder), helps="say which they were trained with: --lora-alpha N",
            )  # fmt: skip
        dropout = told.get("dropout", args.get("lora_dropout"))
        return alpha, float(dropout) if isinstance(dropout, (int, float)) else 0.0

    def output(self) -> Output:
        """Both files, and where each tensor goes."""
        declared = [Declared(one.name, one.shape, self._dtype(one)) for one in self._adapters.tensors]
        file, starts = lay_out_file(MODEL, declared)
        records = [
            Record(MODEL, start, one.dtype, prod(one.shape), self._content(tensor))
            for tensor, one, start in zip(self._adapters.tensors, declared, starts, strict=True)
        ]
        return Output([file, json_file(CONFIG, self._config(), last=True)], records, tuple(self._notes()))

    def _dtype(self, tensor: HuggingFaceTensor) -> str:
        return self._checkpoint.named_tensor(WEIGHT, tensor.regions[0].name).dtype

    def _content(self, tensor: HuggingFaceTensor) -> tuple[Placed, ...]:
        name = tensor.regions[0].name
        source = self._checkpoint.named_tensor(WEIGHT, name)
        return (Placed(0, WantedSlice(WEIGHT, Slice.whole(tensor.regions), {name: source})),)

    def _config(self) -> dict[str, Any]:
        return {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
            "r": self._adapters.rank, "lora_alpha": self._alpha, "lora_dropout": self._dropout, "bias": "none",
            "target_modules": sorted(self._adapters.targets), "use_dora": self._adapters.magnitudes,
            "use_rslora": False, "fan_in_fan_out": False, "init_lora_weights": True, "modules_to_save": None,
        }  # fmt: skip

    def _notes(self) -> Iterator[str]:
        yield f"adapters for {with_article(self.fit.family.name)}, which peft loads onto the model"
        by_columns = (".linear_proj.adapter.weight_magnitude", ".linear_fc2.adapter.weight_magnitude")
        divided = [name for name in self._own if name.endswith(by_columns)]
        if divided and self._checkpoint.layout.tensor > 1:
            # `DoRALinear._get_weight_norm` (peft/dora_layers.py, megatron-bridge 0.3.1).
            yield (
                f"under {self._checkpoint.layout} Megatron-Bridge divided {some(divided, 1)} by norms of each rank's "
                "columns alone: peft, which has whole norms, computes another model than the one that was trained"
            )
        if self.left_out:
            yield f"left out: the model itself, {some(self.left_out, 2)}"

    def read_back(self, folder: Path) -> Checkpoint:
        """The source, once the files of a folder that was written are seen to be whole."""
        read_header(FolderReader(folder), MODEL)
        read_json(folder / CONFIG)
        return self._checkpoint
