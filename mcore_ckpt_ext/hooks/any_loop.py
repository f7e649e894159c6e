"""The seam where all training loops pass: Megatron Core's optimizer says what it wants, and takes what was loaded.

A program asks the optimizer for its sharded state dict (`is_loading=True`), hands it to `dist_checkpointing.load`, and
the answer to the optimizer's `load_state_dict` (megatron/core/optimizer/distrib_optimizer.py, optimizer.py,
dist_checkpointing/serialization.py; core_v0.12.1 to 0.19.2 and the development head of August 2026). What the first
gives out is marked; the second sees from the checkpoint whether Megatron itself would load it, and if not, plans the
resume, and puts the plan where the answer would be; the third proves the plan against the live weights and fills. Until
then nothing is touched, so a program that loads in two calls, or in another order, is served or refused as a whole.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import CheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import Checkpoint, open_checkpoint
from mcore_ckpt_ext.formats.torch_dist import TorchDistCheckpoint
from mcore_ckpt_ext.hooks.announce import announce
from mcore_ckpt_ext.hooks.any_save import ToBeSaved
from mcore_ckpt_ext.hooks.attended import Attended
from mcore_ckpt_ext.hooks.first_look import packs_otherwise
from mcore_ckpt_ext.hooks.process import PROCESS
from mcore_ckpt_ext.hooks.running_version import megatron_version
from mcore_ckpt_ext.layout.parallel import ParallelLayout, placement_changes
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.online.admission import check_adapters
from mcore_ckpt_ext.online.agreement import agreed, gather, is_first_rank, rank_and_size
from mcore_ckpt_ext.online.homes.recognition import Chain, keeps_remainders, stock_stumbles
from mcore_ckpt_ext.online.live_arguments import chunks_of, live_arguments
from mcore_ckpt_ext.optimizer_reshard import Prepared, prepare
from mcore_ckpt_ext.optimizers.bucket_formats import DP_RESHARDABLE
from mcore_ckpt_ext.optimizers.model_space_formats import FULLY_RESHARDABLE
from mcore_ckpt_ext.optimizers.refusals import has_remainders
from mcore_ckpt_ext.optimizers.shifted_state import masters_hold
from mcore_ckpt_ext.optimizers.table import encodings_named, shows_names, stock_can_load
from mcore_ckpt_ext.settings import ACCEPT_LOST, READ_ONCE, VERIFY_ALL

Function = Callable[..., Any]


class Asked(dict[Any, Any]):
    """The sharded state dict of an optimizer that is to be loaded, with the optimizer."""

    optimizer: Any


class Planned(dict[Any, Any]):
    """What stands in the loaded state dict for an optimizer's state: the plan to fill it."""

    prepared: Prepared


def wrap_sharded_state_dict(original: Function) -> Function:
    """Around an optimizer's `sharded_state_dict`: mark what is asked for, and note what is to be saved."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def sharded_state_dict(self: Any, *positional: Any, **keywords: Any) -> Any:
        found = original(self, *positional, **keywords)
        call = signature.bind(self, *positional, **keywords)
        if not call.arguments.get("is_loading", False) or not isinstance(found, dict):
            PROCESS.one(ToBeSaved).note(self, found)
            return found
        asked = found if isinstance(found, Asked) else Asked(found)
        asked.optimizer = self  # the outermost of a chain is asked last
        return asked

    return sharded_state_dict


def wrap_load(original: Function) -> Function:
    """Around `dist_checkpointing.load`: an optimizer that Megatron cannot load is planned instead."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load(*positional: Any, **keywords: Any) -> Any:
        call = signature.bind(*positional, **keywords)
        tree, folder = call.arguments["sharded_state_dict"], call.arguments["checkpoint_dir"]
        asked = list(_asked(tree, ()))
        part_of_ranks = call.arguments.get("process_group") is not None
        # Whoever has Megatron compare what the ranks ask for calls this on every rank.
        is_collective = bool(asked) or call.arguments.get("validate_access_integrity", True)
        if not is_collective or part_of_ranks or PROCESS.one(Attended).is_busy:
            return original(*positional, **keywords)
        if not _all_ask(Path(str(folder)), [one.optimizer for _, one in asked]):
            return original(*positional, **keywords)
        planned = {path: _planned(Path(str(folder)), one.optimizer) for path, one in asked}
        planned = {path: plan for path, plan in planned.items() if plan is not None}
        if not planned:
            return original(*positional, **keywords)
        call.arguments["sharded_state_dict"] = _without(tree, set(planned), ())
        result = original(*call.args, **call.kwargs)
        loaded = result[0] if isinstance(result, tuple) else result
        for path, plan in planned.items():
            _put(loaded, path, plan)
        return result

    return load


def wrap_load_state_dict(original: Function) -> Function:
    """Around an optimizer's `load_state_dict`: a plan is proven and carried out."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        if not isinstance(state_dict, Planned):
            return original(self, state_dict)
        announce(str(state_dict.prepared.prove().fill()))
        return None

    return load_state_dict


def serves(optimizer: Any) -> bool:
    """Whether an optimizer is of a kind that this seam fills: DistributedOptimizers, and nothing else."""
    chain = Chain.of(optimizer) if optimizer is not None else None
    return chain is not None and bool(chain.distributed) and not (chain.unknown or chain.whole)


def _all_ask(folder: Path, optimizers: Sequence[Any]) -> bool:
    """Whether every rank asks for an optimizer; else the load is Megatron's, if it can do it. Collective.

    Programs pass over a rank's optimizer that trains no parameter, a stub, whose `sharded_state_dict` cannot be called
    (`MegatronOptimizer.is_stub_optimizer`, core_v0.12.1 to 0.19.2): nor would they hand it what was loaded.

    Raises:
        ResumeRefusedError: on every rank, where some have no optimizer, and Megatron cannot load that of the others.
    """
    ask = gather(bool(optimizers))
    if all(ask) or not any(ask):
        return ask[0]
    speaks = rank_and_size()[0] == ask.index(True)

    def look() -> None:
        served = [optimizer for optimizer in optimizers if serves(optimizer)] if speaks else []
        if served and any(_is_ours(open_checkpoint(folder), optimizer) for optimizer in served):
            ranks = ", ".join(str(rank) for rank, asks in enumerate(ask) if not asks)
            raise UnsupportedCheckpointError(
                "Megatron cannot load this optimizer, and not every rank has one to fill",
                found=f"no optimizer on rank {ranks}, as where a rank trains no parameter", where=str(folder),
                helps="call mcore_ckpt_ext.load_optimizer(path, model, optimizer) on every rank, once the weights are "
                "loaded, in place of loading the optimizer's state",
            )  # fmt: skip

    agreed("looking at the checkpoint", look)
    return False


def _planned(folder: Path, optimizer: Any) -> Planned | None:
    """The plan for an optimizer that Megatron does not load from a checkpoint; None where it does. Collective.

    Raises:
        ResumeRefusedError: on every rank, when it cannot be filled either.
    """

    def look() -> tuple[bool, bool]:
        if not is_first_rank() or not serves(optimizer):
            return False, True
        checkpoint = open_checkpoint(folder)
        return _is_ours(checkpoint, optimizer), shows_names(checkpoint.optimizer_format)

    ours, named = agreed("looking at the checkpoint", look)[0]
    if not ours and (named or not packs_otherwise(folder, lambda: chunks_of(optimizer), optimizer)):
        return None
    chunks = chunks_of(optimizer)
    running = live_arguments(chunks, optimizer)
    plan = Planned()
    plan.prepared = prepare(
        folder, chunks, optimizer, running,
        verify_all=VERIFY_ALL.value, accept_lost=ACCEPT_LOST.value, read_once=READ_ONCE.value,
    )  # fmt: skip
    return plan


def _is_ours(checkpoint: Checkpoint, optimizer: Any) -> bool:
    """Whether this package fills an optimizer that it serves; where it is not known that stock can, it does."""
    if checkpoint.optimizer_format is None:
        return False
    running = live_arguments(chunks_of(optimizer), optimizer)
    check_adapters(checkpoint, ParallelLayout.from_arguments(running), running)
    both = [_spelled_out(one) for one in (checkpoint.arguments, running)]
    moved = bool(placement_changes(*both)) or not checkpoint.layout.unknown.isdisjoint(_PLACING)
    if not stock_can_load(checkpoint.optimizer_format, moved, megatron_version()):
        return True
    return _goes_wrong(checkpoint, Chain.of(optimizer))


def _goes_wrong(checkpoint: Checkpoint, chain: Chain) -> bool:
    """Whether Megatron itself would load the state, and take it for what it is not; here no proof follows its load.

    What it wrote shifted (`optimizers.shifted_state`) shows beside the weights alone: where these lie elsewhere, the
    state is taken for such a one.
    """
    names = [encoding.name for encoding in encodings_named(checkpoint.optimizer_format)]
    if FULLY_RESHARDABLE in names and not (checkpoint.names(WEIGHT) and _is_as_named(checkpoint)):
        return True
    joins = any(map(keeps_remainders, chain.distributed))
    if isinstance(checkpoint, TorchDistCheckpoint) and has_remainders(checkpoint.index) != joins:
        return True
    return stock_stumbles(chain, DP_RESHARDABLE in names, megatron_version())


def _is_as_named(checkpoint: Checkpoint) -> bool:
    """Whether masters are those of the weights whose names they bear, as far as samples show; a shift is of many."""
    with suppress(CheckpointError):  # what is not known here, stock may know
        state, named = checkpoint.optimizer, checkpoint.names(FP32_PARAM)
        some = named[:: max(1, len(named) // _SAMPLES)]
        return not state.shifted and masters_hold(
            state, some, checkpoint.weights, checkpoint.transfer, checkpoint.proof.first_mismatch
        )
    return True


def _spelled_out(arguments: JobArguments) -> JobArguments:
    """With sizes that may be left out: expert tensor parallelism is tensor parallelism's, virtual stages are one."""
    layout = ParallelLayout.from_arguments(arguments)
    return arguments.changed(
        expert_tensor_parallel_size=layout.expert_tensor, virtual_pipeline_model_parallel_size=layout.virtual_pipeline
    )


_SAMPLES = 512
# Without these nobody knows that the buffers are alike.
_PLACING = ("tensor", "pipeline", "virtual_pipeline", "expert")


def _asked(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Asked]]:
    """The optimizers that a sharded state dict asks for, the outermost of each chain, by where they stand."""
    if isinstance(tree, Asked):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _asked(value, (*path, key))


def _without(tree: Any, paths: set[tuple[Any, ...]], path: tuple[Any, ...]) -> Any:
    """The same tree without what stands at some places; what is above them is new."""
    if not isinstance(tree, dict) or not any(one[: len(path)] == path for one in paths):
        return tree
    return {
        key: _without(value, paths, (*path, key)) for key, value in tree.items() if (*path, key) not in paths
    }  # fmt: skip


def _put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
