"""The online feature: fill a live Megatron optimizer, of any layout, from a checkpoint of any other.

Source = the checkpoint, target = this rank's shards. Three phases, and after each all ranks agree: `prepare` plans
and touches nothing; `prove` reads the masters into memory of its own and compares them with the live weights;
`fill` writes. A refusal in the first two leaves the optimizer as it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt_ext.errors import ModelMismatchError, ProofError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import Checkpoint, open_checkpoint
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_order import WitnessedOrder
from mcore_ckpt_ext.layout.proof import first_mismatch
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.online.agreement import agreed, gather
from mcore_ckpt_ext.online.live_optimizer import (
    LiveShard,
    check_supported,
    distributed_optimizers,
    live_names,
    live_parameters,
    live_shards,
    registered_names,
    state_keys,
)
from mcore_ckpt_ext.online.param_groups import carried_groups
from mcore_ckpt_ext.planning.plan import Plan, WantedSlice, make_plan
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

_PROOF_BLOCK = 1 << 24


@dataclass(frozen=True)
class Summary:
    """What a resume did, over all ranks."""

    source: ParallelLayout
    target: ParallelLayout
    optimizer_format: str
    witnesses: tuple[str, ...]
    parameters: int
    elements: int
    bytes_read: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"optimizer resumed from {self.source} as {self.target}: {self.optimizer_format}, "
            f"{self.bytes_read / 1e6:,.1f} MB read, {self.parameters} parameters proven equal to their weights "
            f"({self.elements:,} elements, layout by {' and '.join(self.witnesses)}), {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class _RankView:
    """What a rank tells the others before planning."""

    names: list[str]
    trained: list[str]
    registered: list[list[str]]


class OptimizerReshard:
    """One resume of one rank; the methods are collective and are called in the order of the class text."""

    def __init__(self, folder: Path, chunks: Sequence[Any], optimizer: Any, arguments: Mapping[str, Any]) -> None:
        """Args: the iteration folder, the unwrapped model chunks, the live optimizer, the run's arguments."""
        self._folder = folder
        self._chunks = chunks
        self._optimizers: list[Any] = distributed_optimizers(optimizer) or []
        self._target = ParallelLayout.from_arguments(arguments)
        self._shards: list[LiveShard] = []
        self._moments = state_keys(self._optimizers)
        self._landing: list[torch.Tensor] = []
        self._parameters = 0
        self._started = time.monotonic()

    def prepare(self, verify_all: bool = False, accept_lost: bool = False) -> None:
        """Open the checkpoint, recover its layout as far as this rank needs it, plan, and check every record.

        Args:
            verify_all: compare the checksums of all records, shared between the ranks.
            accept_lost: take masters that the checkpoint lost from the weights, and moments as zero.

        Raises:
            ResumeRefusedError: on every rank, when some rank cannot.
        """
        views = agreed("reading the live model", self._view)
        self._parameters = len({name for view in views for name in view.trained})
        order = WitnessedOrder("the live model", [names for view in views for names in view.registered])
        live = {name for view in views for name in view.names}
        rank, ranks = _rank_and_size()

        def plan() -> None:
            self._checkpoint = open_checkpoint(self._folder, witnesses=[order])
            check_names(self._checkpoint, live)
            if verify_all:
                _verify_checksums(self._checkpoint, rank, ranks)
            wanted = [
                WantedSlice(kind, shard.slice, shard.live.tensors, shard.live.may_pad)
                for kind in (FP32_PARAM, *self._moments)
                for shard in self._shards
            ]
            if not accept_lost:
                _check_lost(self._checkpoint)
            self._plan: Plan = make_plan(wanted, self._checkpoint, accept_lost)
            for copy in self._plan.copies:
                self._checkpoint.transfer.locate(copy.extent)
            stored = self._checkpoint.param_groups()
            self._groups = [carried_groups(o.optimizer.param_groups, stored) for o in self._optimizers]
            self._scaler = self._checkpoint.grad_scaler()

        agreed("planning the resume", plan)

    @property
    def plan(self) -> Plan:
        """What this rank reads, and where it goes; known after `prepare`."""
        return self._plan

    @property
    def lost_elements(self) -> int:
        """Elements, for each kind, that the checkpoint itself lost and that were accepted; known after `prepare`."""
        return sum(self._checkpoint.optimizer.lost_elements().values())

    @property
    def random_state_grid(self) -> tuple[int, ...] | None:
        """The grid of ranks that stored their random state; known after `prepare`."""
        return self._checkpoint.random_state_grid()

    @property
    def common(self) -> Mapping[str, Any]:
        """The checkpoint's common state; known after `prepare`."""
        return self._checkpoint.common

    def prove(self) -> None:
        """Read this rank's masters and compare them with the live weights, which the framework has loaded by now.

        The masters land in the memory that will hold the first moments afterwards: no byte is read twice, and no
        rank holds more than its own shards.

        Raises:
            ResumeRefusedError: on every rank, when some rank's masters do not round to the weights.
        """

        def work() -> None:
            self._landing = [torch.empty_like(shard.main) for shard in self._shards]
            masters = self._plan.of_kind(FP32_PARAM)
            self._checkpoint.transfer.execute(masters, self._landing)
            for fill in masters.fills:
                # Rows of padded vocabulary, and lost elements that the user accepts: whatever the weights are.
                part = slice(fill.start, fill.stop)
                self._landing[fill.target][part] = self._shards[fill.target].weight[part].float()
            for shard, master in zip(self._shards, self._landing, strict=True):
                _prove(shard, master, self._folder)

        agreed("proving the masters against the weights", work)

    def fill(self) -> Summary:
        """Write masters, moments, parameter groups and the gradient scaler into the live optimizer.

        Raises:
            ResumeRefusedError: on every rank, when reading failed on some rank; the run must not go on.
        """

        def work() -> int:
            with torch.no_grad():
                for shard, master in zip(self._shards, self._landing, strict=True):
                    shard.main.copy_(master)
            more = [[torch.empty_like(shard.main) for shard in self._shards] for _ in self._moments[1:]]
            moments = dict(zip(self._moments, [self._landing, *more], strict=True))
            # Destinations by target index: the masters, which are done, then the moments, kind by kind.
            destinations = [*self._landing, *(tensor for tensors in moments.values() for tensor in tensors)]
            for kind, tensors in moments.items():
                self._checkpoint.transfer.execute(self._plan.of_kind(kind), destinations)
                for shard, tensor in zip(self._shards, tensors, strict=True):
                    _set_state(shard, kind, tensor)
            for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
                state: dict[str, Any] = {"optimizer": {"param_groups": groups}}
                if self._scaler is not None:
                    state["grad_scaler"] = self._scaler
                optimizer.load_state_dict(state)
            return self._plan.bytes_read

        read = agreed("writing the optimizer", work, "it is partly written: do not train on, start again")
        elements = gather(sum(shard.slice.numel for shard in self._shards))
        witnesses = gather(self._checkpoint.optimizer.witnesses())
        self._checkpoint.reader.close()
        return Summary(
            source=self._checkpoint.layout,
            target=self._target,
            optimizer_format=str(self._checkpoint.optimizer_format),
            witnesses=tuple(sorted({label for labels in witnesses for label in labels})),
            parameters=self._parameters,
            elements=sum(elements),
            bytes_read=sum(read),
            seconds=time.monotonic() - self._started,
        )

    def _view(self) -> _RankView:
        check_supported(self._optimizers)
        live = live_parameters(self._chunks)
        self._shards = list(live_shards(self._optimizers, live))
        ranks = [optimizer.data_parallel_group.rank() for optimizer in self._optimizers]
        first_replica = not ranks or 0 in ranks
        registered = [registered_names(chunk, live) for chunk in self._chunks] if first_replica else []
        trained = list(dict.fromkeys(name for shard in self._shards for name in shard.live.tensors))
        return _RankView(live_names(self._chunks) if first_replica else [], trained, registered)


def unproven_names(chunks: Sequence[Any], optimizer: Any) -> list[str]:
    """Parameters of the live optimizer whose masters do not round to the live weights; touches no checkpoint.

    It is how a load by the framework itself is proven. Optimizers without plain fp32 masters are passed over.
    """
    optimizers = distributed_optimizers(optimizer) or []
    try:
        check_supported(optimizers)
    except UnsupportedCheckpointError:
        return []
    found: dict[str, None] = {}
    for shard in live_shards(optimizers, live_parameters(chunks)):
        for begin in range(0, shard.main.numel(), _PROOF_BLOCK):
            part = slice(begin, begin + _PROOF_BLOCK)
            if first_mismatch(shard.main[part], shard.weight[part]) is not None:
                found[shard.name] = None
    return list(found)


def check_names(checkpoint: Checkpoint, live: set[str]) -> None:
    """Refuse a model that would leave stored parameters unused.

    Raises:
        ModelMismatchError: the checkpoint holds a tensor that no rank's model has.
    """
    unused = [name for name in checkpoint.names(WEIGHT) if name not in live]
    if unused:
        raise ModelMismatchError(
            "the checkpoint holds parameters that the model does not have",
            found=f"{len(unused)} of them, {', '.join(unused[:3])}",
            where=str(checkpoint.folder),
            helps="resume with the model arguments that the checkpoint was written with (layers, hidden size, ...)",
        )


def _check_lost(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that Megatron itself wrote with holes.

    Raises:
        ProofError: optimizer state is lost; the message names all of it.
    """
    lost = checkpoint.optimizer.lost_elements()
    if lost:
        raise ProofError(
            "Megatron wrote this fully_reshardable optimizer state shifted; most of it can be repaired, but not all",
            found=f"{sum(lost.values())} elements in no slot: "
            + ", ".join(f"{count} of {name}" for name, count in lost.items()),
            where=str(checkpoint.folder),
            helps="resume from an iteration saved without --dist-ckpt-optim-fully-reshardable, or set "
            "MCORE_CKPT_EXT_ACCEPT_LOST=1: the lost masters are then taken from the weights, their moments are zero",
        )


def _verify_checksums(checkpoint: Checkpoint, rank: int, ranks: int) -> None:
    for number, (file, offset, length) in enumerate(sorted(set(checkpoint.archives()))):
        if number % ranks == rank:
            TorchArchive(checkpoint.reader, file, offset, length).verify_checksums()


def _prove(shard: LiveShard, master: torch.Tensor, folder: Path) -> None:
    for begin in range(0, master.numel(), _PROOF_BLOCK):
        part = slice(begin, begin + _PROOF_BLOCK)
        mismatch = first_mismatch(master[part], shard.weight[part])
        if mismatch is not None:
            raise ProofError(
                "a master does not round to the weight beside it",
                found=f"master {mismatch.master!r}",
                expected=f"weight {mismatch.weight!r}",
                where=f"{shard.name}, element {shard.slice.start + begin + mismatch.position} of this rank's part, "
                f"{folder}",
                helps="the checkpoint is damaged or its weights were edited after the save: resume from another "
                "iteration, or with --no-load-optim and a fresh optimizer",
            )


def _set_state(shard: LiveShard, kind: str, values: torch.Tensor) -> None:
    inner = shard.optimizer.optimizer
    group, order = shard.optimizer.model_param_group_index_map[shard.live.parameter]
    main = inner.param_groups[group]["params"][order]
    inner.state[main] = {**inner.state.get(main, {}), kind: values}


def _rank_and_size() -> tuple[int, int]:
    distributed = torch.distributed
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)

