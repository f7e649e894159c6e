"""The interface of an open checkpoint, the same for every format, and what the formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from mcore_ckpt_ext.errors import ProofError, interpreting
from mcore_ckpt_ext.formats.huggingface_folder import TOKENIZER_FOLDER, companions
from mcore_ckpt_ext.formats.stacking import ShardedKey, sharded_key, stacks_layers
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import LocalModels, StoredWeight
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder, known_orders
from mcore_ckpt_ext.layout.proof import first_mismatch
from mcore_ckpt_ext.layout.proposals import Proposal, by_order, by_sidecar
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR_FILE
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.planning.plan import Source, StoredSlice
from mcore_ckpt_ext.storage.remote import folder_reader
from mcore_ckpt_ext.transfer import Transfer, read_slice


class Weights(Source, Protocol):
    """The model's arrays, in model space."""

    def names(self) -> list[str]:
        """All names."""


class OptimizerState(Source, Protocol):
    """The optimizer state of a checkpoint, in model space."""

    kinds: tuple[str, ...]

    def names(self) -> list[str]:
        """All parameters with optimizer state."""

    def witnesses(self) -> list[str]:
        """Where the layouts that were needed so far are known from."""

    def lost_elements(self) -> dict[str, int]:
        """Parameters of which the checkpoint lacks elements, and of how many, for each kind."""


class Checkpoint(ABC):
    """One iteration folder, seen in model space. Nothing but metadata is read until a tensor is asked for."""

    format: str

    def __init__(self, folder: Path, witnesses: Sequence[ParameterOrder] = ()) -> None:
        """Open a folder.

        Args:
            folder: the `iter_XXXXXXX` or `release` folder.
            witnesses: parameter orders to try after the sidecar and before the known ones.

        Raises:
            UnreadableCheckpointError: metadata is missing or damaged.
            UnsupportedCheckpointError: it is of a kind that is not read.
        """
        self.folder = folder
        self.reader = folder_reader(folder)
        self.transfer = Transfer(self.reader)
        self._witnesses = tuple(witnesses)

    @property
    @abstractmethod
    def common(self) -> dict[str, Any]:
        """The common state: arguments, iteration, scheduler and the like."""

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """The model's arrays."""

    @property
    @abstractmethod
    def optimizer_format(self) -> str | None:
        """The name of the optimizer's encoding, Megatron's own where it has one; None without an optimizer."""

    @property
    @abstractmethod
    def optimizer(self) -> OptimizerState:
        """The optimizer's state.

        Raises:
            UnsupportedCheckpointError: it is in a format that is not read.
        """

    @property
    @abstractmethod
    def experts_apart(self) -> bool:
        """Whether experts have an optimizer of their own."""

    @abstractmethod
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups as each rank group stored them, with repetitions."""

    @abstractmethod
    def grad_scaler(self) -> dict[str, Any] | None:
        """The state of the gradient scaler (fp16 only)."""

    @abstractmethod
    def extra_states(self) -> Mapping[str, Any]:
        """The modules' extra states (fp8 scales; nothing in other precisions), by model-space name."""

    @abstractmethod
    def random_states(self) -> Mapping[tuple[int, ...], Any]:
        """The state of the random generators by rank: (pipeline, tensor[, data])."""

    @abstractmethod
    def archives(self) -> Iterator[tuple[str, int, int]]:
        """Every archive of the checkpoint: (file, offset, length)."""

    @property
    def args(self) -> dict[str, Any]:
        """Megatron's parsed arguments of the job that wrote the checkpoint, by name."""
        return dict(vars(self.common["args"])) if "args" in self.common else {}

    @cached_property
    def layout(self) -> ParallelLayout:
        """The parallel layout of the job that wrote the checkpoint."""
        return ParallelLayout.from_arguments(self.args)

    @property
    def iteration(self) -> int:
        """The training iteration."""
        return int(self.common.get("iteration", 0))

    @property
    def released(self) -> bool:
        """Whether it is a model to begin with, of no iteration of a job (Megatron's `release` folder)."""
        return self.folder.name == "release"

    @property
    def vocabulary(self) -> int | None:
        """Tokens of the vocabulary without padding, where the format itself says."""
        return None

    def notices(self) -> list[str]:
        """What whoever converts it should know."""
        return []

    def companions(self) -> dict[str, bytes]:
        """Small files that belong to the model, its tokenizer for example, by name."""
        return companions(self.folder / TOKENIZER_FOLDER)

    @cached_property
    def models(self) -> LocalModels:
        """The local parameters of the ranks that wrote the checkpoint."""
        stored = {}
        for name in self.weights.names():
            tensor = self.weights.logical_tensor(WEIGHT, name)
            if tensor is not None:
                stored[name] = StoredWeight(tensor, _grid(self.weights.stored(WEIGHT, name)))
        return LocalModels(stored, self.args, self.layout, self.experts_apart, self.layers())

    def layers(self) -> list[list[range]] | None:
        """Global decoder layers by `[pipeline rank][virtual stage]`, where the format itself shows them."""
        return None

    def sharded_keys(self) -> Mapping[str, ShardedKey]:
        """Of each name its array in `torch_dist`, and the index on the axes that count layers and experts."""
        names = self.weights.names()
        stacked = stacks_layers(names, self.args)
        return {name: sharded_key(name, stacked) for name in names}

    def random_state_grid(self) -> tuple[int, ...] | None:
        """Ranks for which the state of the random generators is stored as one array; None where it is not."""
        return None

    def orders(self) -> list[ParameterOrder]:
        """The witnesses of the order in which parameters were registered."""
        return [*self._witnesses, *known_orders(self.args)]

    def proposals(self, rules: Sequence[PackingRule]) -> list[Proposal]:
        """The witnesses of the gradient buffers' layout, the one to believe first at the front."""
        recorded = [by_sidecar(self.models, self.sidecar)] if self.sidecar else []
        return recorded + [by_order(self.models, order, rule) for order in self.orders() for rule in rules]

    @cached_property
    def sidecar(self) -> Sidecar | None:
        """The layout recorded beside the checkpoint, if there is a readable one."""
        path = self.folder / SIDECAR_FILE
        try:
            return Sidecar.from_json(path.read_text())
        except (OSError, ValueError):
            # A missing or foreign sidecar only means one witness fewer: the layout is proven either way.
            return None

    def kinds(self) -> tuple[str, ...]:
        """All kinds that the checkpoint holds."""
        return (WEIGHT, *(self.optimizer.kinds if self.optimizer_format else ()))

    def names(self, kind: str) -> list[str]:
        """Model-space names of one kind."""
        if kind == WEIGHT:
            return self.weights.names()
        return self.optimizer.names() if kind in self.optimizer.kinds else []

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """See `planning.plan.Source`."""
        source: Source = self.weights if kind == WEIGHT else self.optimizer
        return source.logical_tensor(kind, name)

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """See `planning.plan.Source`."""
        source: Source = self.weights if kind == WEIGHT else self.optimizer
        return source.stored(kind, name)

    def tensor(self, kind: str, name: str) -> TensorHandle:
        """The handle of one tensor.

        Raises:
            KeyError: the checkpoint has none of that kind and name.
        """
        logical = self.logical_tensor(kind, name)
        if logical is None:
            raise KeyError(f"no {kind} {name} in {self.folder}")
        return TensorHandle(self, kind, logical)


@dataclass(frozen=True)
class TensorHandle:
    """One global tensor of a checkpoint; reading is lazy."""

    checkpoint: Checkpoint
    kind: str
    logical: LogicalTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.logical.shape

    @property
    def dtype(self) -> torch.dtype:
        """Stored dtype."""
        found: torch.dtype = getattr(torch, self.logical.dtype)
        return found

    def read(self, region: Region | None = None) -> torch.Tensor:
        """The tensor, or the part of it that `region` names; optimizer state is proven where it is read.

        Raises:
            ProofError: the masters of that part do not round to its weights.
            CheckpointError: it is damaged or incomplete, or its layout cannot be recovered.
        """
        with interpreting(self.checkpoint.folder):
            return self._proven(region or Region.whole(self.logical.name, self.logical.shape))

    def _proven(self, wanted: Region) -> torch.Tensor:
        values = self._read(self.kind, wanted)
        if self.kind != WEIGHT:
            masters = values if self.kind == FP32_PARAM else self._read(FP32_PARAM, wanted)
            mismatch = first_mismatch(masters, self._read(WEIGHT, wanted))
            if mismatch is not None:
                raise ProofError(
                    "a master does not round to the weight beside it",
                    found=f"master {mismatch.master!r}",
                    expected=f"weight {mismatch.weight!r}",
                    where=f"{wanted.name}, element {mismatch.position} of {wanted}, {self.checkpoint.folder}",
                    helps="the checkpoint is damaged, or its weights were edited after the save",
                )
        return values.view(wanted.sizes)

    def _read(self, kind: str, region: Region) -> torch.Tensor:
        return read_slice(self.checkpoint, self.checkpoint.transfer, kind, Slice.whole((region,)))


def _grid(stored: Sequence[StoredSlice]) -> tuple[tuple[int, ...], ...]:
    """The distinct offsets of the stored chunks of a tensor, axis by axis."""
    offsets = [piece.slice.regions[0].offsets for piece in stored]
    return tuple(tuple(sorted(set(axis))) for axis in zip(*offsets, strict=True))
