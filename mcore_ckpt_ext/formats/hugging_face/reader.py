"""Reads a Hugging Face folder: weights under Megatron's names, and arguments of a job to train them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from mcore_ckpt_ext.errors import UnreadableCheckpointError, join_some, quantity, with_indefinite_article
from mcore_ckpt_ext.families.bridge import import_notices, run_config
from mcore_ckpt_ext.families.config_keys import MTP_LAYERS
from mcore_ckpt_ext.families.family import HuggingFaceTensor
from mcore_ckpt_ext.families.flags import arguments_without_flag, training_flags
from mcore_ckpt_ext.families.full_width_qk_norm import FullWidthQKNorm
from mcore_ckpt_ext.families.recognition import Fit
from mcore_ckpt_ext.families.rope import rope_notices
from mcore_ckpt_ext.families.text_parts import text_names, turned_experts
from mcore_ckpt_ext.families.vision_towers import VISION_TOWERS
from mcore_ckpt_ext.formats.hugging_face.duplicates import same_bytes
from mcore_ckpt_ext.formats.hugging_face.folder import CONFIG, StoredTensor, is_huggingface, read_tensors, written_by_us
from mcore_ckpt_ext.formats.hugging_face.left_out import left_out_tensors
from mcore_ckpt_ext.formats.hugging_face.model import (
    LOCAL,
    TRANSFORMER_ENGINE,
    chosen_family_notes,
    common_state,
    described_model,
    mismatch,
)
from mcore_ckpt_ext.formats.hugging_face.quantized import check_numbers, dequantize
from mcore_ckpt_ext.formats.hugging_face.weights import ModelSpaceWeights
from mcore_ckpt_ext.formats.hugging_face.weights_only import WeightsAlone
from mcore_ckpt_ext.formats.initial_extra_states import fresh_extra_states
from mcore_ckpt_ext.formats.open_options import DEFAULT_OPTIONS, OpenOptions
from mcore_ckpt_ext.formats.parts import Files, Job, States, StoredWeights
from mcore_ckpt_ext.formats.view import CheckpointView, OpenedFormat
from mcore_ckpt_ext.job.model_arguments import complete
from mcore_ckpt_ext.job.releases import NORMALIZES_PLAIN_QUERIES
from mcore_ckpt_ext.planning.array_location import QuantizedMatrix, RawArray
from mcore_ckpt_ext.storage.budget import Budget
from mcore_ckpt_ext.storage.dcp_index import FolderIndex

NAME = "hf"
_SHOWN = 6
_ENTRY_BYTES = 60  # least size of a tensor's entry in a header
_STEPS_A_REGION = 16  # cost of creating a region


class HuggingFaceCheckpoint(WeightsAlone):
    """A folder that transformers loads."""

    name = NAME
    kind: ClassVar[str] = "a Hugging Face folder"

    @classmethod
    @override
    def recognizes(cls, stored: FolderIndex) -> bool:
        return is_huggingface(stored.folder)

    @classmethod
    @override
    def may_be_replaced(cls, folder: Path) -> bool:
        return (folder / CONFIG).is_file() and written_by_us(folder)

    def __init__(
        self, folder: Path, options: OpenOptions = DEFAULT_OPTIONS, *, below: str = "", mtp: bool = True
    ) -> None:
        """Read the configuration and the files' headers.

        Args:
            folder: the folder.
            options: see `FormatReader`.
            below: the subfolder that contains the model.
            mtp: whether multi-token prediction (MTP) layers are read, if the folder has any.

        Raises:
            UnreadableCheckpointError: a file is missing or damaged, or tensors contradict `config.json`.
            UnsupportedCheckpointError: the kind of model is not supported.
        """
        super().__init__(folder, options)
        self._below = below
        described = described_model(folder / below, options.family, options.transformer_impl)
        self.config = described.config
        self.family = described.family
        self.whole = described.whole
        self.whole_config = described.whole_config
        self._neutral = described.neutral
        self.model_arguments = described.arguments
        self._vision: dict[str, StoredTensor] = {}
        stored, unread = read_tensors(self.files.reader, below)
        self._extents = [tensor.extent for tensor in stored.values()]
        message = f"ignored weights in the folder, since other files take precedence: {join_some(unread)}"
        self._stale = [message] if unread else []
        if self.whole:
            names = text_names(stored)
            self._vision = {name: stored[name] for name, ours in names.items() if ours is None}
            stored = {ours: self._transpose(ours, stored[name]) for name, ours in names.items() if ours is not None}
        stored = {name: stored[given] for given, name in self.family.with_prefixes(stored).items()}
        stored, self._of_activations = dequantize(stored, self.config, folder / below)
        held = self.family.mtp_layers(stored, self.model_arguments)
        self._holds_no_mtp = not held
        layers = held if mtp else 0
        self.model_arguments = self.model_arguments.replace(mtp_num_layers=layers or None)
        self.left_out: list[str] = []
        self._weights = ModelSpaceWeights(self._match(stored))

    @cached_property
    @override
    def format(self) -> OpenedFormat:
        return replace(
            super().format,
            is_model_folder=True,
            notices=self._notices,
            # Legacy files do not record which pipeline rank has the MTP layers.
            limit_to_legacy=lambda view: self.without_mtp().view if self.has_mtp else view,
            run_config=self._run_config,
            bridge_notices=lambda: import_notices(self.family, self.model_arguments),
            starts_jobs=self._starts_jobs,
        )

    @cached_property
    @override
    def files(self) -> Files:
        return replace(
            super().files,
            auxiliary_files_below=self._below,
            raw_arrays=self._raw_arrays,
            unread=lambda *, objects=True: [
                *left_out_tensors(self.left_out, self._stored, self._vision, self._of_activations)
            ],
        )

    @cached_property
    @override
    def model(self) -> StoredWeights:
        is_fixed = self.family.needs_engine or self.model_arguments.transformer_impl == LOCAL
        return replace(
            super().model,
            fit=lambda: Fit(self.family, self.model_arguments, []),
            other_layer_spec=None if is_fixed else LOCAL,
            has_norms_of_all_heads=isinstance(self.family, FullWidthQKNorm),
            mismatch_with=lambda job: mismatch(self.family, self.model_arguments, job, self.folder),
        )

    @cached_property
    @override
    def job(self) -> Job:
        return replace(super().job, vocabulary=lambda: self.vocabulary, unbuildable=self._unbuildable)

    @cached_property
    @override
    def states(self) -> States:
        return States(self._extra_states)

    def _transpose(self, name: str, tensor: StoredTensor) -> StoredTensor:
        shape = turned_experts(name, tensor.shape, self.config)
        return tensor if shape is None else replace(tensor, shape=shape, is_transposed=True)

    def without_mtp(self) -> HuggingFaceCheckpoint:
        """Read the folder again without the MTP layers."""
        return self.read_again(HuggingFaceCheckpoint, mtp=False)

    def read_again(self, kind: type[HuggingFaceCheckpoint], mtp: bool = True) -> HuggingFaceCheckpoint:
        """Read the folder again with another class, or without MTP layers."""
        return kind(self.folder, replace(self.options, family=self.family), below=self._below, mtp=mtp)

    @property
    def has_mtp(self) -> bool:
        """True if the model has MTP layers."""
        return bool(self.model_arguments.mtp_num_layers)

    def _match(self, stored: Mapping[str, StoredTensor]) -> list[tuple[HuggingFaceTensor, StoredTensor]]:
        """Match the tensors that the configuration requires with those in the folder, one to one."""
        model = self.model_arguments
        layers = model.num_layers
        experts = model.num_experts or 1
        if layers > len(stored):
            raise UnreadableCheckpointError(
                "config.json describes more layers than the folder can contain",
                found=quantity(len(stored), "tensor"), expected=quantity(layers, "layer"), where=str(self.folder),
            )  # fmt: skip
        # Query, key and value are interleaved rows of one parameter, so each query group has regions of its own.
        regions = layers * (experts + 3 * model.num_query_groups)
        Budget(_ENTRY_BYTES * len(stored), CONFIG).spend(_STEPS_A_REGION * regions, "layers, experts and query groups")
        self._check_tied(stored)
        expected = {tensor.name: tensor for tensor in self.family.tensors(model, stored)}
        stored = self._drop_copies(stored, expected.values())
        ignored = self.family.unmapped_tensors(stored.keys(), model, self.config) - expected.keys()
        self._tied_copies = ignored & {self.family.output_layer}
        self.left_out = sorted([*ignored - self._tied_copies, *self._of_activations, *self._vision])
        self._stored = {**stored, **self._vision}
        missing = [name for name in expected if name not in stored]
        surplus = [name for name in stored if name not in expected and name not in ignored]
        wrong = [
            f"{name} is {stored[name].shape}, not {tensor.shape}"
            for name, tensor in expected.items()
            if name in stored and stored[name].shape != tensor.shape
        ]
        if missing or surplus or wrong:
            unmatched = [f"no {name}" for name in missing[:_SHOWN]] + [
                with_indefinite_article(name) for name in surplus[:_SHOWN]
            ]
            more = max(0, len(missing) - _SHOWN) + max(0, len(surplus) - _SHOWN) + max(0, len(wrong) - _SHOWN)
            raise UnreadableCheckpointError(
                f"the tensors do not match the {self.family.name} that config.json describes",
                found="; ".join(unmatched + wrong[:_SHOWN]) + (f"; and {more} more" if more else ""),
                where=str(self.folder),
                hint="the folder mixes models, or needs a family of its own "
                "(python -m pydoc mcore_ckpt_ext.families.family): --family path.py:Name",
            )
        check_numbers({name: stored[name] for name in expected}, str(self.folder))
        return [(tensor, stored[name]) for name, tensor in expected.items()]

    def _drop_copies(
        self, stored: Mapping[str, StoredTensor], expected: Iterable[HuggingFaceTensor]
    ) -> Mapping[str, StoredTensor]:
        """Leave out tensors that duplicate `expected` ones, after comparing them.

        Raises:
            UnreadableCheckpointError: a duplicate differs from its original.
        """
        copies = self.family.copies(self.model_arguments)
        if not any(copy.name in stored for copy in copies):
            return stored
        originals = {tensor.regions[0].name: tensor.name for tensor in expected}
        remaining = dict(stored)
        for copy in copies:
            original = stored.get(originals.get(copy.regions[0].name, ""))
            repeated = remaining.pop(copy.name, None)
            if (
                repeated is not None
                and original is not None
                and not same_bytes(self.files.reader, self.files.transfer, repeated, original)
            ):
                raise UnreadableCheckpointError(
                    "a multi-token prediction (MTP) layer has its own weights where Megatron shares those of the model",
                    where=copy.name,
                )
        return remaining

    def _check_tied(self, stored: Mapping[str, StoredTensor]) -> None:
        """Check that a tied model's stored output layer, otherwise unread, is a copy of the embedding."""
        copy = stored.get(self.family.output_layer)
        embedding = stored.get(self.family.embedding)
        if self.model_arguments.untie_embeddings_and_output_weights or copy is None or embedding is None:
            return
        if copy.shape != embedding.shape or not same_bytes(self.files.reader, self.files.transfer, copy, embedding):
            raise UnreadableCheckpointError(
                "config.json ties the output layer to the embedding, but the two differ",
                where=self.family.output_layer,
                hint='set "tie_word_embeddings": false in config.json if the output layer has its own weights',
            )

    @override
    def _read_common(self) -> dict[str, Any]:
        """Return the common state of a release checkpoint for the job that will read it."""
        return common_state(self.model_arguments, self.vocabulary, self._weights.dtypes)

    @property
    def vocabulary(self) -> int:
        """The number of tokens in the vocabulary without padding."""
        return int(self.model_arguments.require("vocab_size"))

    def _raw_arrays(self) -> Iterator[RawArray]:
        return (extent for extent in self._extents if isinstance(extent, RawArray))

    def _notices(self, view: CheckpointView) -> list[str]:
        notes = [f"model family: {self.family.described}"] if self.family.origin else []
        notes += [*self.family.notices(self.model_arguments), *rope_notices(self.config, self.model_arguments)]
        notes += [*self._neutral.notices(self.family.mapped_keys), *chosen_family_notes(self.family, self.config)]
        if self.whole:
            text = f"of {self.whole} only the text is read, as {with_indefinite_article(self.family.name)}"
            has_tower = self.whole in VISION_TOWERS
            rest = "--for bridge also converts the vision tower" if has_tower else "other parts are not converted yet"
            notes.append(f"{text}; {rest}")
        extents = [stored.extent for _, stored in self._weights.matched]
        if decoded := [extent.dtype for extent in extents if isinstance(extent, QuantizedMatrix)]:
            tensors = quantity(len(decoded), "tensor is", "tensors are")
            notes.append(f"{tensors} quantized, and decoded to the {decoded[0]} that codes and scales represent")
        notes += [f"{name} is not read: the output layer is tied to the embedding" for name in self._tied_copies]
        listed = [f"{key}: {self.config[key]}" for key in MTP_LAYERS if self.config.get(key)]
        if listed and self._holds_no_mtp:
            notes.append(f"config.json lists multi-token prediction (MTP) layers missing from the folder ({listed[0]})")
        flags = shlex.join(self.training_flags())
        if self.family.bridge_only_reason:
            lacks = f"pretrain_gpt.py cannot train this model: {self.family.bridge_only_reason}"
            notes.append(f"{lacks}. Megatron-Bridge can; it reads run_config.yaml")
        elif lacking := arguments_without_flag(self.model_arguments, since_0_19=True):
            values = ", ".join(f"{name} = {value}" for name, value in lacking.items())
            notes.append(
                f"pretrain_gpt.py cannot train this model: it has no flag for {values}, or does not pass the flag on. "
                f"Megatron-Bridge can; it reads run_config.yaml. The other flags are: {flags}"
            )
        else:
            notes.append(f"train it with: {flags}")
        if self.job.arguments().layernorm_epsilon == 0:
            notes.append(
                "the epsilon of its norms is 0, which turns a row of zeros into NaN; published models have 1e-5 or "
                "1e-6, so check config.json"
            )
        notes += self.with_uncommon_dtype()
        return notes + self._stale

    def _starts_jobs(self) -> str:
        if self.family.bridge_only_reason or arguments_without_flag(self.model_arguments, since_0_19=True):
            return ""
        return "starts from its weights: --load FOLDER; tested with 0.19.2"

    def with_uncommon_dtype(self) -> list[str]:
        """Return a note on parameters whose dtype differs from most others; empty if there are none."""
        others = self._weights.with_uncommon_dtype
        dtypes = " and ".join(sorted({tensor.dtype for tensor in others}))
        rest = f"unlike the rest, so that a job in {self._weights.dtypes[0]} rounds them"
        return [f"in {dtypes}, {rest}: {join_some([tensor.name for tensor in others], _SHOWN)}"] if others else []

    def _unbuildable(self, version: tuple[int, int]) -> str | None:
        model = self.model_arguments
        if model.multi_latent_attention and not model.q_lora_rank and NORMALIZES_PLAIN_QUERIES.is_of(version):
            return f"0.19 {NORMALIZES_PLAIN_QUERIES.what}"
        return None

    def training_flags(self) -> list[str]:
        """Return the command line arguments of `pretrain_gpt.py` that describe this model."""
        return training_flags(complete(self.job.arguments()))

    def _run_config(self) -> str:
        return run_config(self.family, complete(self.job.arguments()))

    def _extra_states(self) -> Mapping[str, Any]:
        """Return the extra states of new modules, which Megatron requires."""
        return fresh_extra_states(self._weights.names(), self.model_arguments.transformer_impl == TRANSFORMER_ENGINE)
