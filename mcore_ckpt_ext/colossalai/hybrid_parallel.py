"""HybridParallelPlugin: exact resumes under TP, PP and ZeRO, with state sliced like its parameter.

ColossalAI (0.5.0, checkpoint_io/hybrid_parallel_checkpoint_io.py) writes these files stage by stage. This module keeps
the files, and corrects their content:
* ColossalAI slices and gathers moments by their shapes only: moments of GPT-2's fused QKV end up in another order than
  the weight (``gather_from_sharded_optimizer_state``, ``load_states_into_optimizer``), and a padded vocabulary fails
  with an assertion. Without tensor parallelism it cannot even save one in a single file (``save_unsharded_model``).
* It does not save masters and loss scale.
* The sharded model has a tied parameter under its first name only (``_model_sharder``); a last pipeline stage, which
  has the other name, then keeps its initial values.
* It ignores entries that do not fit: ``strict`` is set to False.
Stock ColossalAI loads the files that are written here.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mcore_ckpt_ext.colossalai import master_state, tensor_parallel
from mcore_ckpt_ext.colossalai.asynchronous import former_save_finished, pinned_copy, write_model
from mcore_ckpt_ext.colossalai.files import write_one
from mcore_ckpt_ext.colossalai.hybrid_cuts import (
    entries,
    is_per_element,
    join_shards,
    local_state,
    whole_state_dict,
)
from mcore_ckpt_ext.colossalai.hybrid_loading import load_model, load_optimizer
from mcore_ckpt_ext.colossalai.lost_states import MASTER, PADDING
from mcore_ckpt_ext.colossalai.master_state import masters_in_state, take
from mcore_ckpt_ext.colossalai.optimizer import State
from mcore_ckpt_ext.colossalai.ranks import Ranks
from mcore_ckpt_ext.colossalai.reading import load_states, read_by_all, read_optimizer_by_all, read_sharded_by_all
from mcore_ckpt_ext.colossalai.replaced import ReplacedMethods, keeps_signature
from mcore_ckpt_ext.colossalai.state import untie

_CPU = torch.device("cpu")


class HybridParallelOptimizerMethods(ReplacedMethods):
    """Methods for HybridParallelAMPOptimizer and HybridParallelZeroOptimizer."""

    update_master_params = master_state.update_master_params


class HybridParallelCheckpointIOMethods(ReplacedMethods):
    """Methods for HybridParallelCheckpointIO; not for MoeHybridParallelPlugin's subclass of it.

    The subclass has its own methods for optimizers (0.5.0, checkpoint_io/moe_checkpoint.py: ``MoECheckpointIO``).
    """

    @staticmethod
    def _model_sharder(
        model: Any,  # a module, or with LoRA a wrapper that is none
        prefix: str = "",
        keep_vars: bool = False,
        size_per_shard: int = 1024,
        pinned_state_dicts: dict[str, torch.Tensor] | None = None,
    ) -> Iterator[tuple[OrderedDict[str, Any], int]]:
        """Yield shards like ColossalAI, but with all names of tied parameters."""
        from colossalai.checkpoint_io import HybridParallelCheckpointIO
        from colossalai.checkpoint_io.utils import StateDictSharder

        if not isinstance(model, nn.Module):
            # With LoRA, ColossalAI renames parameters (0.5.0, interface/model.py: PeftUnwrapMixin).
            original: Any = HybridParallelCheckpointIO
            yield from original._non_strict__model_sharder(model, prefix, keep_vars, size_per_shard, pinned_state_dicts)
            return
        sharder = StateDictSharder(size_per_shard)
        for name, value in entries(model):
            if not isinstance(value, torch.Tensor):
                continue
            key = prefix + name
            block, size = sharder.append_param(key, pinned_copy({key: value}, pinned_state_dicts)[key])
            if block is not None:
                yield block, size
        yield sharder.current_block, sharder.current_block_size

    @staticmethod
    @keeps_signature
    def gather_from_sharded_optimizer_state(
        state: State,
        param: torch.Tensor,
        original_shape: torch.Size,
        dp_group: Any,
        tp_group: Any,
        use_zero: bool,
        inplace: bool,
        device: torch.device = _CPU,
        pinned_state_dicts: dict[str, Any] | None = None,
    ) -> State:
        """Gather a state like ColossalAI, but in the order of the parameter, with its padding rows."""
        whole = state if inplace else copy.copy(state)
        for name, value in list(whole.items()):
            if is_per_element(name, value, param):
                whole_value, rows = join_shards(value, param, dp_group if use_zero else None)
                for key, tensor in ((name, whole_value), (f"{name}{PADDING}", rows)):
                    if tensor is not None:
                        whole |= pinned_copy({key: tensor.detach().to(device, copy=True)}, pinned_state_dicts)
        if MASTER not in whole and tensor_parallel.padding_shape(param) is not None:
            # If the weights are the masters, the model's file has all of them but these rows.
            whole[f"{MASTER}{PADDING}"] = join_shards(param.detach().contiguous(), param, None)[1]
        return whole

    def save_unsharded_model(
        self,
        model: Any,
        checkpoint: str,
        gather_dtensor: bool = True,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Save the model like ColossalAI, but atomically."""
        if _is_of_experts(self) or not isinstance(model.unwrap(), nn.Module):
            self._non_strict_save_unsharded_model(model, checkpoint, gather_dtensor, use_safetensors, use_async)
            return
        model._force_wait_all_gather()
        state: Any = {}
        if self.dp_rank == 0:
            state = _merge_stages(self, whole_state_dict(model.unwrap()))
            if use_safetensors:
                untie(state, {}, omit=False)
        if use_async:
            write_model(self, model, _ranks(self), Path(checkpoint), state)
        else:
            write_one(Path(checkpoint), state, _ranks(self))

    def load_states_into_optimizer(self, optimizer: Any, state_dict: Mapping[Any, State], id_map: Any) -> None:
        """Load states like ColossalAI, but sliced like the parameters."""
        for key, state in state_dict.items():
            stepped = id_map.get(int(key))
            if stepped is not None:
                optimizer.optim.state[stepped] = local_state(optimizer, stepped, state)

    def save_sharded_optimizer(
        self,
        optimizer: Any,
        checkpoint: str,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Save like ColossalAI, with the masters and the loss scale."""
        from colossalai.checkpoint_io.utils import get_optimizer_base_filenames

        base, index, _ = get_optimizer_base_filenames(prefix, use_async)
        finished = former_save_finished(self, optimizer, _ranks(self), checkpoint, (base, index), use_async)
        with finished, masters_in_state(optimizer, _ranks(self)):
            self._non_strict_save_sharded_optimizer(
                optimizer, checkpoint, gather_dtensor, prefix, size_per_shard, use_async
            )

    def save_unsharded_optimizer(
        self, optimizer: Any, checkpoint: str, gather_dtensor: bool = True, use_async: bool = False
    ) -> None:
        """Save like ColossalAI, with the masters and the loss scale."""
        finished = former_save_finished(self, optimizer, _ranks(self), checkpoint, use_async=use_async)
        with finished, masters_in_state(optimizer, _ranks(self)):
            # ColossalAI takes the memory of a sharded save for that of this file (0.5.0).
            self.pinned_state_dicts.pop(id(optimizer), None)
            self._non_strict_save_unsharded_optimizer(optimizer, checkpoint, gather_dtensor, use_async)

    def load_sharded_optimizer(self, optimizer: Any, checkpoint_index_file: Path, *_: Any, **__: Any) -> None:
        """Load all files as one state, so that it is checked as a whole; with masters and loss scale."""
        ranks = _ranks(self)
        load_optimizer(self, ranks, optimizer, read_optimizer_by_all(ranks, Path(checkpoint_index_file), exactly=False))
        take(optimizer)

    def load_unsharded_optimizer(self, optimizer: Any, checkpoint: str, *_: Any, **__: Any) -> None:
        """Load like ColossalAI, but check the state as a whole; with masters and loss scale."""
        ranks = _ranks(self)
        load_optimizer(self, ranks, optimizer, read_by_all(ranks, Path(checkpoint), load_states))
        take(optimizer)

    def load_sharded_model(
        self, model: Any, checkpoint_index_file: Path, strict: bool = False, *more: Any, **keywords: Any
    ) -> None:
        """Load all files as one state dict; any name of a tied parameter is accepted, and `strict` applies."""
        if _is_of_experts(self) or not isinstance(model.unwrap(), nn.Module):
            self._non_strict_load_sharded_model(model, checkpoint_index_file, strict, *more, **keywords)
            return
        ranks = _ranks(self)
        entries = read_sharded_by_all(ranks, Path(checkpoint_index_file), exactly=False)
        load_model(ranks, model, entries, strict, is_sharded=True)

    def load_unsharded_model(
        self, model: Any, checkpoint: str, strict: bool = False, *more: Any, **keywords: Any
    ) -> None:
        """Load like ColossalAI; any name of a tied parameter is accepted, and `strict` applies."""
        if _is_of_experts(self) or not isinstance(model.unwrap(), nn.Module):
            self._non_strict_load_unsharded_model(model, checkpoint, strict, *more, **keywords)
            return
        ranks = _ranks(self)
        load_model(ranks, model, read_by_all(ranks, Path(checkpoint)), strict, is_sharded=False)


def _is_of_experts(checkpoint_io: Any) -> bool:
    """Return True for MoeHybridParallelPlugin's checkpoint IO (0.5.0, checkpoint_io/moe_checkpoint.py)."""
    return "ep_group" in vars(checkpoint_io)


def _ranks(checkpoint_io: Any) -> Ranks:
    groups = (checkpoint_io.global_dp_group, checkpoint_io.pp_group, checkpoint_io.tp_group, checkpoint_io.sp_group)
    return Ranks(tuple(dict.fromkeys(groups)))


def _merge_stages(checkpoint_io: Any, state: Any) -> Any:
    """Gather the entries of all pipeline stages on the first one; other stages keep theirs."""
    if checkpoint_io.pp_size == 1 or checkpoint_io.tp_rank != 0:
        return state
    group = checkpoint_io.pp_group
    on_cpu = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    gathered: list[Any] | None = [None] * checkpoint_io.pp_size if checkpoint_io.pp_rank == 0 else None
    dist.gather_object((on_cpu, state._metadata), gathered, dst=dist.get_global_rank(group, 0), group=group)
    for entries_of_stage, metadata in gathered or ():
        state.update(entries_of_stage)
        state._metadata.update(metadata)
    return state
