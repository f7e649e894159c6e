"""Writes a Hugging Face folder in the layout of `save_pretrained` of transformers 4 and 5.

Tensors have the names of released models, which both versions read. transformers 5 stacks experts in memory, but also
saves them separately (`save_original_format`, transformers/core_model_loading.py, seen in 5.23).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, groupby
from math import prod
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError, join_some, quantity, with_indefinite_article
from mcore_ckpt_ext.families.config_keys import MTP_LAYERS, TOKENS
from mcore_ckpt_ext.families.contradictions import unwritten
from mcore_ckpt_ext.families.family import Family, HuggingFaceTensor, names_matching, parameter_shapes
from mcore_ckpt_ext.families.flags import ignored_arguments
from mcore_ckpt_ext.families.forward_pass import notes_on, unknown
from mcore_ckpt_ext.families.passed_arguments import replaced_values, with_passed
from mcore_ckpt_ext.families.recognition import Fit, family_of_megatron
from mcore_ckpt_ext.families.text_parts import text_config
from mcore_ckpt_ext.formats.auxiliary_files import (
    GENERATION_CONFIG,
    companion_notes,
    configured_tokens,
    json_of,
    special_tokens,
    tokenizer_files,
    tokenizer_tokens,
)
from mcore_ckpt_ext.formats.hugging_face.files import (
    WrittenTensor,
    is_linear,
    matrix_order_of,
    not_quantized,
    pickled_file,
    plain_file,
    shards_of,
)
from mcore_ckpt_ext.formats.hugging_face.folder import CONFIG
from mcore_ckpt_ext.formats.hugging_face.options import HuggingFace
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.hugging_face.vision import (
    as_text_model,
    checked_whole,
    text_tensors,
    vision_tensors,
    with_vision_tower,
)
from mcore_ckpt_ext.formats.laid_out import OutputPlan, with_notes
from mcore_ckpt_ext.formats.messages import contradictions
from mcore_ckpt_ext.formats.open_options import OpenOptions
from mcore_ckpt_ext.formats.peft.writer import lay_out as lay_out_adapters
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.job.assignments import parse_assignments
from mcore_ckpt_ext.job.model_arguments import ModelArguments, complete
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.adapters import is_adapter
from mcore_ckpt_ext.model_space.anatomy import VOCABULARY
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.planning.plan import TargetSlice, named_tensor
from mcore_ckpt_ext.planning.write_plan import Output, OutputFile, QuantizedOutput, Record, WriteItem
from mcore_ckpt_ext.storage.json_text import json_file
from mcore_ckpt_ext.storage.safetensors import Declared

# An argument of Megatron's own parser, which descriptions by other training loops do not have.
_OF_PRETRAIN_GPT = "use_checkpoint_args"
_SHOWN = 6
_DTYPE = ("torch_dtype", "dtype")
_BLOCK = 128
_SCALES = "_scale_inv"
_FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK],
}  # fmt: skip


class HuggingFaceTarget:
    """Lays out one folder.

    Args:
        checkpoint: the source.
        options: the options of the folder.
        family: the model's family as passed by the user; recognized by default.
        tokenizer: small files that the user adds, by name; in `auxiliary_files` they replace the model's own.
    """

    def __init__(
        self, checkpoint: CheckpointView, options: HuggingFace, family: Family | None, tokenizer: Mapping[str, bytes]
    ) -> None:
        """Raise UnsupportedCheckpointError if no family fits, or the vocabulary size is unknown."""
        self._checkpoint = checkpoint
        self._options = options
        self._tokenizer = tokenizer
        self.auxiliary_files = {**checkpoint.files.auxiliary_files(), **tokenizer}
        config = json_of(self.auxiliary_files, CONFIG)
        self._vision_tensors = vision_tensors(checkpoint, config)
        vision_names = {tensor.regions[0].name for tensor in self._vision_tensors}
        names = [name for name in checkpoint.model.weights().names() if name not in vision_names]
        passed = parse_assignments(options.arguments)
        self._where = "".join((str(checkpoint.files.folder), *(f", --argument {text}" for text in options.arguments)))
        model = complete(with_passed(checkpoint.job.arguments(), passed, self._where))
        self._replaced = replaced_values(checkpoint.job.arguments(), passed)
        self._check_ignored(model, passed)
        model = model.replace(vocab_size=self._vocabulary())
        once = (text_config(config) or config).get("model_type")
        self.fit: Fit = family_of_megatron(model, names, family, once, self._where)
        if lost := unwritten(self.fit.family, self.fit.arguments):
            raise UnsupportedCheckpointError(
                f"config.json of {with_indefinite_article(self.fit.family.name)} cannot describe the job's model",
                found="; ".join(lost), where=self._where, hint="pass another family: --family NAME",
            )  # fmt: skip
        self.left_out = names_matching(names, self.fit.family.megatron_left_out)
        exports_masters = options.kind == FP32_PARAM and checkpoint.optimizer.format() is not None
        self._masters = set(checkpoint.names(FP32_PARAM)) if exports_masters else set()
        if options.kind == FP32_PARAM and not self._masters:
            raise UnsupportedCheckpointError(
                "the checkpoint has no fp32 masters", found=", ".join(checkpoint.kinds()),
                where=str(checkpoint.files.folder), hint="export the weights: leave --from out",
            )  # fmt: skip
        self._tensors = [*text_tensors(checkpoint, self.fit.family, self.fit.arguments), *self._vision_tensors]
        self._check_shapes()

    @property
    def has_vision(self) -> bool:
        """True if the model has a vision part."""
        return bool(self._vision_tensors)

    def _check_ignored(self, model: ModelArguments, passed: Collection[str]) -> None:
        """Refuse arguments Megatron may have ignored, except in release checkpoints, which no job trained."""
        flags = {name: value for name, value in ignored_arguments(model).items() if name not in passed}
        if flags and not self._checkpoint.job.is_release and self._checkpoint.job.arguments().is_set(_OF_PRETRAIN_GPT):
            default = {
                "rope_scaling_factor": "=8",
                "rotary_seq_len_interpolation_factor": f"={model.rotary_seq_len_interpolation_factor} since 0.19, "
                "=null up to 0.18",
            }
            raise UnsupportedCheckpointError(
                "the job was given flags that pretrain_gpt.py, or an older one, does not pass on to its model",
                found=", ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items()),
                where=str(self._checkpoint.files.folder),
                hint="pass the values used in training; with pretrain_gpt.py: "
                + " ".join(f"--argument {name}{default[name]}" for name in flags),
            )

    def output(self) -> Output:
        """Plan all files, and the location of each tensor."""
        repeated = self.fit.family.copies(self.fit.arguments)
        tensors = list(chain.from_iterable(self._tensors_to_write(tensor) for tensor in (*self._tensors, *repeated)))
        shards = list(shards_of(tensors, self._options.max_shard_size))
        stem, suffix = ("pytorch_model", "bin") if self._options.pickled else ("model", "safetensors")
        files: list[OutputFile] = []
        records: list[Record] = []
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            file, file_records = (pickled_file if self._options.pickled else plain_file)(
                f"{stem}{part}.{suffix}", shard
            )
            files.append(file)
            records += file_records
            weight_map |= {tensor.declared.key: file.name for tensor in shard}
        if len(shards) > 1:
            metadata = {
                "total_parameters": sum(prod(tensor.declared.shape) for tensor in tensors),
                "total_size": sum(tensor.declared.nbytes for tensor in tensors),
            }
            index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
            files.append(json_file(f"{stem}.{suffix}.index.json", index))
        sizes: dict[str, int] = {}
        for tensor in tensors:
            if tensor.quantized is not None:
                continue
            sizes[tensor.declared.dtype] = sizes.get(tensor.declared.dtype, 0) + tensor.declared.nbytes
        config, lacking, is_published = self._config()
        named = special_tokens(self.auxiliary_files)
        rows = int(self.fit.arguments.require("vocab_size"))
        # A published configuration stays as it is, unless the user has passed a tokenizer.
        unset = [key for key in TOKENS if key not in config] if is_published and self._tokenizer else lacking
        taken = {key: named[key] for key in unset if named.get(key, rows) < rows}
        config |= taken
        lacking = [key for key in lacking if key not in config]
        # A missing key means a default of the transformers class, which fits the released model's vocabulary only.
        config |= dict.fromkeys(lacking)
        dtype = max(sizes, key=lambda dtype: sizes[dtype])
        declared = {config[key] for key in _DTYPE if config.get(key) is not None}
        if declared != {dtype} and not (is_published and not declared and not self._options.dtype):
            config = {key: value for key, value in config.items() if key not in _DTYPE} | {_DTYPE[0]: dtype}
        if self._options.quantize:
            config["quantization_config"] = {**_FP8, "modules_to_not_convert": not_quantized(tensors)}
        return Output(
            [*files, *self._small_files(config, taken)],
            records,
            tuple(self._notes(config, [key for key in lacking if key in TOKENS[:2]])),
        )

    def _small_files(self, config: Mapping[str, Any], taken: Mapping[str, int]) -> list[OutputFile]:
        """Return the small files; `taken`: special tokens of the tokenizer, for keys absent from `config`."""
        tokens = {key: config[key] for key in TOKENS if config.get(key) is not None}
        generation = json_of(self.auxiliary_files, GENERATION_CONFIG) or {"_from_model_config": True, **tokens}
        if GENERATION_CONFIG not in self._tokenizer:  # otherwise the tokenizer's own is copied
            generation = {**taken, **generation}
            declared = json_of(self._tokenizer, CONFIG)
            generation |= {key: declared[key] for key in TOKENS if declared.get(key) is not None}
        files = [
            OutputFile(name, len(content), ((0, content),))
            for name, content in self.auxiliary_files.items()
            if name not in (CONFIG, GENERATION_CONFIG)
        ]
        return [*files, json_file(GENERATION_CONFIG, generation), json_file(CONFIG, config, last=True)]

    def _config(self) -> tuple[dict[str, Any], list[str], bool]:
        """Compose `config.json` without the dtype.

        Returns:
            The configuration, the token keys without a value, and whether it is a published configuration.
        """
        family = self.fit.family
        stored = json_of(self.auxiliary_files, CONFIG)
        if self._vision_tensors:
            whole = checked_whole(stored, family, self.fit.arguments, self._checkpoint)
            inside = {**(whole.get("text_config") or {}), **whole}
            return whole, [key for key in TOKENS if key not in inside], False
        text = text_config(stored)
        stored = {**text, "architectures": [family.architecture]} if text else stored
        if stored.get("model_type") == family.model_type:
            if (updated := family.updated_config(stored, self.fit.arguments)) is not None:
                return updated, [], True
            kept = family.copied_keys(stored)
        else:  # the tokenizer may come from a model of another family, then only its token keys apply
            kept = {key: stored[key] for key in TOKENS if key in stored}
        config = {**kept, **family.config(self.fit.arguments)}
        return config, [key for key in TOKENS if key not in config], False

    def _vocabulary(self) -> int:
        source = self._checkpoint
        vocab_size = self._options.vocab_size or source.job.vocabulary() or configured_tokens(self.auxiliary_files)
        # A tokenizer often has fewer tokens than the embedding has rows, and never more.
        vocab_size = vocab_size or max(source.job.tokens or 0, tokenizer_tokens(self.auxiliary_files) or 0) or None
        if vocab_size is None:
            raise UnsupportedCheckpointError(
                "the size of the vocabulary without Megatron's padding is unknown",
                found=f"{quantity(vocabulary_rows(source) or 0, 'row')} with it", where=str(source.files.folder),
                hint="pass --vocab-size N, or --tokenizer PATH",
            )  # fmt: skip
        return vocab_size

    def _check_shapes(self) -> None:
        """Check that parameters have the shapes that the arguments imply; the vocabulary may be padded."""
        wrong = []
        for name, shape in parameter_shapes(self._tensors).items():
            stored_shape = named_tensor(self._checkpoint, WEIGHT, name).shape
            longer = name in VOCABULARY and stored_shape[1:] == shape[1:] and stored_shape[0] > shape[0]
            if stored_shape != shape and not longer:
                wrong.append(f"{name} is {stored_shape}, not {shape}")
        if wrong:
            raise UnsupportedCheckpointError(
                "the checkpoint's arguments contradict its parameters", found="; ".join(wrong[:_SHOWN]),
                where=self._where, hint="pass the values used in training: --argument NAME=VALUE, and --vocab-size N",
            )  # fmt: skip

    def _notes(self, config: Mapping[str, Any], missing: Sequence[str]) -> Iterator[str]:
        """Yield notes for users who load the folder; `missing`: token keys without a value in `config.json`."""
        family = self.fit.family
        yield f"model family: {family.described}"
        arguments = self.fit.arguments
        yield from (*self._replaced, *family.notices(arguments), *notes_on(arguments), *unknown(arguments))
        shapes = parameter_shapes(self._tensors)
        yield from contradictions(self._checkpoint)
        stored = named_tensor(self._checkpoint, WEIGHT, VOCABULARY[0]).shape[0]
        kept = shapes[VOCABULARY[0]][0]
        if stored > kept:
            rows = quantity(stored - kept, "row of the vocabulary is", "rows of the vocabulary are")
            yield f"the last {rows} cut: it has {quantity(kept, 'token')}"
        if self.left_out:
            yield f"left out, no equivalent in Hugging Face's {family.name}: {join_some(self.left_out, _SHOWN)}"
        plain = [name for name in shapes if name not in self._masters]
        if self._masters and plain:
            yield f"copied from the weights, having no master: {join_some(plain, _SHOWN)}"
        layers = [f"{key}: {config[key]}" for key in MTP_LAYERS if config.get(key)]
        if layers and not self.fit.arguments.mtp_num_layers:
            yield f"config.json keeps {layers[0]} as published; the folder holds no such layers"
        if missing:
            has_tokenizer = tokenizer_tokens(self.auxiliary_files) is not None
            advice = (
                "the tokenizer names none, so add it" if has_tokenizer else "name a folder that has (--tokenizer PATH)"
            )
            yield f"config.json has no {' and '.join(missing)}: {advice}, or edit config.json"

    def _tensors_to_write(self, tensor: HuggingFaceTensor) -> Iterator[WrittenTensor]:
        """Yield the tensors to write for a tensor: itself, or its codes and their scales."""
        laid_out = self._laid_out(tensor)
        if not self._options.quantize or not is_linear(tensor) or tensor in self._vision_tensors:
            yield laid_out
            return
        name = tensor.name
        if tensor.transposed or tensor.interleaved > 1:
            raise UnsupportedCheckpointError(
                f"--quantize does not support the transposed weights of {self.fit.family.name}",
                found=name, where=str(self._checkpoint.files.folder), hint="leave --quantize out",
            )  # fmt: skip
        rows, columns = tensor.shape
        for scales in (False, True):
            matrix = QuantizedOutput(name, laid_out.content, rows, columns, _BLOCK, _BLOCK, scales)
            grid = (-(-rows // _BLOCK), -(-columns // _BLOCK))
            codes = Declared(name, (rows, columns), "float8_e4m3fn")
            yield WrittenTensor(Declared(name + _SCALES, grid, "float32") if scales else codes, (), matrix)

    def _laid_out(self, tensor: HuggingFaceTensor) -> WrittenTensor:
        placed = []
        start = 0
        dtypes = set()
        for name, regions in groupby(tensor.regions, key=lambda region: region.name):
            kind = FP32_PARAM if name in self._masters else WEIGHT
            source = named_tensor(self._checkpoint, kind, name)
            part = Slice.whole(tuple(regions))
            placed.append(WriteItem(start, TargetSlice(kind, part, {name: source}), matrix_order_of(tensor, part)))
            start += part.numel
            dtypes.add(source.dtype)
        dtype = dtypes.pop()
        if self._options.dtype and not tensor.keeps_dtype and getattr(torch, dtype).is_floating_point:
            dtype = self._options.dtype
        return WrittenTensor(Declared(tensor.name, tensor.shape, dtype), tuple(placed))


def lay_out(checkpoint: CheckpointView, target: HuggingFace, family: Family | None) -> OutputPlan:
    """Lay out a folder of the model, or of its adapters for peft if it has any.

    Raises:
        UnsupportedCheckpointError: no family fits, or the vocabulary size is unknown.
        UsageError: an option does not apply to this checkpoint.
    """
    if any(map(is_adapter, checkpoint.names(WEIGHT))):
        return lay_out_adapters(checkpoint, target, family)
    merged = checkpoint.composition.merge_notes
    if target.lora_alpha is not None and not merged:
        raise UsageError("the checkpoint has no adapters", found="--lora-alpha", hint="leave the option out")
    layout = HuggingFaceTarget(checkpoint, target, family, tokenizer_files(target.tokenizer))
    spec = layout.fit.arguments.transformer_impl

    def reads_back(folder: Path) -> CheckpointView:
        written = HuggingFaceCheckpoint(folder, OpenOptions(family=layout.fit.family, transformer_impl=spec)).view
        return as_text_model(with_vision_tower(written)) if layout.has_vision else written

    taken = {name: data for name, data in layout.auxiliary_files.items() if name not in (CONFIG, GENERATION_CONFIG)}
    output = with_notes(layout.output(), [*merged, *companion_notes(taken, checkpoint)])
    return OutputPlan(output, "", (WEIGHT,), layout.left_out, target.kind != WEIGHT, reads_back)
