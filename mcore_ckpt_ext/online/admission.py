"""What a checkpoint and a live job must have in common before a resume is planned."""

from __future__ import annotations

from operator import eq

from mcore_ckpt_ext.errors import ModelMismatchError, ProofError
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.model_space.names import spelled_as_in
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.online.homes.home import LiveShard
from mcore_ckpt_ext.online.live_model import Spell
from mcore_ckpt_ext.settings import ACCEPT_LOST
from mcore_ckpt_ext.storage.torch_archive import TorchArchive


def spelling_in(checkpoint: Checkpoint, live: set[str]) -> Spell:
    """Gives live names as the checkpoint has them; `str` where they are the same, as under the same layer spec."""
    known = set(checkpoint.names(WEIGHT))
    spelled = {name: spelled_as_in(known, name) for name in live}
    return str if all(map(eq, spelled, spelled.values())) else lambda name: spelled.get(name, name)


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


def check_kinds(checkpoint: Checkpoint, shard: LiveShard) -> None:
    """Refuse an optimizer that keeps different state for a parameter than the one that wrote the checkpoint.

    Raises:
        ModelMismatchError: its state cannot be derived from what is stored, or something stored would be dropped.
    """
    state = checkpoint.optimizer
    stored = {kind for kind in state.carried_kinds if state.logical_tensor(kind, shard.name) is not None} - {FP32_PARAM}
    wanted = set(shard.kinds)
    if stored and stored != wanted:
        raise ModelMismatchError(
            "the checkpoint was written by an optimizer of another kind than the running one",
            found=f"{' and '.join(sorted(stored))} of this parameter",
            expected=" and ".join(sorted(wanted)) or "nothing but its master",
            where=f"{shard.name}, {checkpoint.folder}",
            helps="what one kind keeps, Adam's moments or Muon's momentum, follows from nothing that another keeps: "
            "resume with the optimizer of the checkpoint (--optimizer; `mcore-ckpt inspect` tells which), or with "
            "--no-load-optim",
        )


def check_lost(checkpoint: Checkpoint) -> None:
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
            f"{ACCEPT_LOST.name}=1: the lost masters are then taken from the weights, their moments are zero",
        )


def verify_checksums(checkpoint: Checkpoint, rank: int, ranks: int) -> None:
    """Compare the checksums of this rank's share of all records.

    Raises:
        UnreadableCheckpointError: one differs.
    """
    for number, (file, offset, length) in enumerate(sorted(set(checkpoint.archives()))):
        if number % ranks == rank:
            TorchArchive(checkpoint.reader, file, offset, length).verify_checksums()
