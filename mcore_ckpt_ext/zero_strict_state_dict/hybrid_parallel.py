"""HybridParallelPlugin: exact resumes, and state that is cut and joined as its parameter is, under TP, PP and ZeRO.

ColossalAI (0.5.0, checkpoint_io/hybrid_parallel_checkpoint_io.py) writes these files stage by stage, and does so here,
too; what it hands to the files, and takes from them, is put right:

* Moments are cut and joined by shapes alone there: those of GPT-2's fused QKV end up in another order than its weight
  (``gather_from_sharded_optimizer_state``, ``load_states_into_optimizer``), and a padded vocabulary ends in an
  assertion; without tensor parallelism one cannot even be saved in one file (``save_unsharded_model``).
* Masters and loss scale are not saved.
* A tied parameter is in the sharded model under its first name only (``_model_sharder``); a last pipeline stage, which
  knows it by the other, then keeps what it was made with.
* Whatever does not fit is passed over: ``strict`` is set to False.

Stock loads the files that are written here.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mcore_ckpt_ext.errors import ModelMismatchError, ResumeRefusedError
from mcore_ckpt_ext.zero_strict_state_dict import beside, padding, tensor_parallel
from mcore_ckpt_ext.zero_strict_state_dict.beside import beside_the_state, take
from mcore_ckpt_ext.zero_strict_state_dict.content import Digests, digests, refuse_different, summary
from mcore_ckpt_ext.zero_strict_state_dict.files import (
    Files,
    param_groups_beside,
    read_by_all,
    read_sharded_by_all,
    write_tensors,
)
from mcore_ckpt_ext.zero_strict_state_dict.loading import StateDictMismatchError
from mcore_ckpt_ext.zero_strict_state_dict.optimizer import MASTER
from mcore_ckpt_ext.zero_strict_state_dict.ranks import Ranks

PADDING = "_padding"
"""What the padding rows of a state are called: ``exp_avg_padding``. Asynchronous files allow no dot there."""
_MODEL, _OPTIMIZER = "the model is untouched", "the optimizer is untouched"
_SHOWN = 4
_CPU = torch.device("cpu")

State = dict[str, Any]


class HybridParallelOptimizerMethods:
    """For HybridParallelAMPOptimizer and HybridParallelZeroOptimizer."""

    update_master_params = beside.update_master_params


class HybridParallelCheckpointIOMethods:
    """For HybridParallelCheckpointIO; not for MoeHybridParallelPlugin's, which inherits from it."""

    _non_strict_save_sharded_optimizer: Any
    _non_strict_save_unsharded_optimizer: Any
    _non_strict_load_sharded_optimizer: Any
    _non_strict_load_unsharded_optimizer: Any
    _non_strict_load_sharded_model: Any
    _non_strict_load_unsharded_model: Any
    _non_strict_load_states_into_optimizer: Any
    _non_strict_save_unsharded_model: Any

    @staticmethod
    def _model_sharder(
        model: nn.Module, prefix: str = "", keep_vars: bool = False, size_per_shard: int = 1024,
        pinned_state_dicts: dict[str, torch.Tensor] | None = None,
    ) -> Iterator[tuple[OrderedDict[str, Any], int]]:  # fmt: skip
        """As ColossalAI, with all names of tied parameters."""
        from colossalai.checkpoint_io.utils import StateDictSharder

        sharder = StateDictSharder(size_per_shard)
        for name, value in _entries(model, share_ties=False):
            if not isinstance(value, torch.Tensor):
                continue
            block, size = sharder.append_param(prefix + name, _in_pinned(value, prefix + name, pinned_state_dicts))
            if block is not None:
                yield block, size
        yield sharder.current_block, sharder.current_block_size

    @staticmethod
    def gather_from_sharded_optimizer_state(
        state: State, param: torch.Tensor, original_shape: torch.Size, dp_group: Any, tp_group: Any, use_zero: bool,
        inplace: bool, device: torch.device = _CPU, pinned_state_dicts: dict[str, Any] | None = None,
    ) -> State:  # fmt: skip
        """As ColossalAI, joined as the parameter is, with the rows of its padding."""
        whole = state if inplace else copy.copy(state)
        for name, value in list(whole.items()):
            if isinstance(value, torch.Tensor) and name != "step":
                joined, rows = _joined(name, value, param, dp_group if use_zero else None)
                _refuse_shape(name, joined.shape, original_shape)
                for key, tensor in ((name, joined), (f"{name}{PADDING}", rows)):
                    if tensor is not None:
                        kept = tensor.detach().to(device, copy=True)
                        whole[key] = _in_pinned(kept, key, pinned_state_dicts)
        if MASTER not in whole and tensor_parallel.padding_shape(param) is not None:
            # Where the weights are the masters, the model's file has all of them but these rows.
            whole[f"{MASTER}{PADDING}"] = _joined(MASTER, param.detach().contiguous(), param, None)[1]
        return whole

    def save_unsharded_model(
        self, model: Any, checkpoint: str, gather_dtensor: bool = True, use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:  # fmt: skip
        """As ColossalAI, and whole or not at all."""
        if use_async or _is_of_experts(self) or not isinstance(model.unwrap(), nn.Module):
            self._non_strict_save_unsharded_model(model, checkpoint, gather_dtensor, use_safetensors, use_async)
            return
        model._force_wait_all_gather()
        state: dict[str, Any] = {}
        if self.dp_rank == 0:  # type: ignore[attr-defined]  # ColossalAI's own
            state = _of_all_stages(self, dict(_entries(model.unwrap(), share_ties=not use_safetensors)))
        path = Path(checkpoint)
        with Files(path.parent, path.name, is_writer=dist.get_rank() == 0) as files:

            def finish() -> None:
                files.add(path.name, partial(write_tensors, state))
                files.publish()

            _ranks(self).agreed(f"saving {path.name}", finish, "no new checkpoint is there")

    def load_states_into_optimizer(self, optimizer: Any, state_dict: Mapping[Any, State], id_map: Any) -> None:
        """As ColossalAI, cut as the parameters are."""
        if _is_of_experts(self):
            self._non_strict_load_states_into_optimizer(optimizer, state_dict, id_map)
            return
        for key, state in state_dict.items():
            stepped = id_map.get(int(key))
            if stepped is not None:
                optimizer.optim.state[stepped] = _local_state(self, optimizer, stepped, state)

    def save_sharded_optimizer(self, optimizer: Any, *positional: Any, **keywords: Any) -> None:
        """Like ColossalAI's, with the masters and the loss scale."""
        with beside_the_state(optimizer):
            self._non_strict_save_sharded_optimizer(optimizer, *positional, **keywords)

    def save_unsharded_optimizer(self, optimizer: Any, *positional: Any, **keywords: Any) -> None:
        """Like ColossalAI's, with the masters and the loss scale."""
        with beside_the_state(optimizer):
            self._non_strict_save_unsharded_optimizer(optimizer, *positional, **keywords)

    def load_sharded_optimizer(self, optimizer: Any, checkpoint_index_file: Path, *more: Any, **keywords: Any) -> None:
        """Load all files as one state, so that it is checked as a whole; with masters and loss scale."""
        index = Path(checkpoint_index_file)
        if _is_of_experts(self) or index.name.endswith(".safetensors.index.json"):
            self._non_strict_load_sharded_optimizer(optimizer, checkpoint_index_file, *more, **keywords)
        else:
            ranks = _ranks(self)
            states = read_sharded_by_all(ranks, index, exactly=False)
            found = ranks.agreed("reading the param groups", partial(param_groups_beside, index), _OPTIMIZER)
            _load_optimizer(self, ranks, optimizer, found[dist.get_rank()], states)
        take(optimizer)

    def load_unsharded_optimizer(self, optimizer: Any, checkpoint: str, *more: Any, **keywords: Any) -> None:
        """As ColossalAI, checked as a whole; with masters and loss scale."""
        if _is_of_experts(self) or str(checkpoint).endswith(".safetensors"):
            self._non_strict_load_unsharded_optimizer(optimizer, checkpoint, *more, **keywords)
        else:
            ranks = _ranks(self)
            content = read_by_all(ranks, lambda: [Path(checkpoint)])
            _load_optimizer(self, ranks, optimizer, content["param_groups"], content["state"])
        take(optimizer)

    def load_sharded_model(
        self, model: Any, checkpoint_index_file: Path, strict: bool = False, *more: Any, **keywords: Any
    ) -> None:
        """Load all files as one state dict: any name of a tied parameter will do, and `strict` means it."""
        if _is_of_experts(self) or not isinstance(model.unwrap(), nn.Module):
            self._non_strict_load_sharded_model(model, checkpoint_index_file, strict, *more, **keywords)
            return
        ranks = _ranks(self)
        _load_model(ranks, model, read_sharded_by_all(ranks, Path(checkpoint_index_file), exactly=False), strict)

    def load_unsharded_model(
        self, model: Any, checkpoint: str, strict: bool = False, *more: Any, **keywords: Any
    ) -> None:
        """As ColossalAI; any name of a tied parameter will do, and `strict` means it."""
        if _is_of_experts(self) or not isinstance(model.unwrap(), nn.Module):
            self._non_strict_load_unsharded_model(model, checkpoint, strict, *more, **keywords)
            return
        ranks = _ranks(self)
        _load_model(ranks, model, read_by_all(ranks, lambda: [Path(checkpoint)]), strict)


def _is_of_experts(checkpoint_io: Any) -> bool:
    """Whether it is that of MoeHybridParallelPlugin (0.5.0, checkpoint_io/moe_checkpoint.py)."""
    return "ep_group" in vars(checkpoint_io)


def _ranks(checkpoint_io: Any) -> Ranks:
    from colossalai.utils import get_current_device

    groups = (checkpoint_io.global_dp_group, checkpoint_io.pp_group, checkpoint_io.tp_group, checkpoint_io.sp_group)
    return Ranks(tuple(dict.fromkeys(groups)), get_current_device())


def _in_pinned(value: Any, name: str, pinned: dict[str, Any] | None) -> Any:
    """A value in the caller's pinned memory, as ColossalAI wants for asynchronous writing."""
    if pinned is None or not isinstance(value, torch.Tensor):
        return value
    if name not in pinned:
        pinned[name] = torch.empty_like(value, device="cpu", pin_memory=torch.cuda.is_available())
    return pinned[name].copy_(value)


def _of_all_stages(checkpoint_io: Any, state: dict[str, Any]) -> dict[str, Any]:
    """What all pipeline stages have, on the first of them; the others keep theirs."""
    if checkpoint_io.pp_size == 1 or checkpoint_io.tp_rank != 0:
        return state
    group = checkpoint_io.pp_group
    on_cpu = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    found: list[Any] | None = [None] * checkpoint_io.pp_size if checkpoint_io.pp_rank == 0 else None
    dist.gather_object(on_cpu, found, dst=dist.get_global_rank(group, 0), group=group)
    return {name: value for stage in found or [state] for name, value in stage.items()}


def _entries(module: nn.Module, share_ties: bool) -> Iterator[tuple[str, Any]]:
    """Parameters under all their names, persistent buffers, extra state; all ranks of a stage iterate.

    Args:
        module: this stage's.
        share_ties: names of one parameter come with one tensor; else each with its own, as safetensors need it.
    """
    seen: dict[nn.Parameter, torch.Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if share_ties and parameter in seen:
            yield name, seen[parameter]
            continue
        room = tensor_parallel.room_for(parameter, parameter.dtype, parameter.device)
        value = tensor_parallel.whole(parameter, parameter.detach().contiguous(), room)
        # A file keeps all of a storage, and safetensors know none with two names.
        is_part = value.numel() * value.element_size() < value.untyped_storage().nbytes()
        value = value.clone() if parameter in seen or is_part else value
        yield name, value
        seen[parameter] = value if share_ties else parameter
    yield from ((name, buffer.detach()) for name, buffer in _persistent_buffers(module))
    for prefix, owner in module.named_modules():
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}._extra_state".removeprefix("."), owner.get_extra_state()


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), buffer


def _joined(
    name: str, value: torch.Tensor, parameter: Any, zero_group: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The whole of one state of a parameter, and the rows of its padding.

    Args:
        name: of the state.
        value: this rank's part.
        parameter: the one that computes.
        zero_group: the ranks that share this slice of it, flat, in equal parts; None without ZeRO.
    """
    from colossalai.utils import get_current_device

    value = value.to(get_current_device())
    if zero_group is not None:
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(zero_group))]
        dist.all_gather(parts, value, group=zero_group)
        value = torch.cat(parts)[: parameter.numel()].view(parameter.shape)
    if value.shape != parameter.shape:
        _refuse_shape(name, value.shape, parameter.shape)
    room = tensor_parallel.room_for(parameter, value.dtype, value.device)
    return tensor_parallel.whole(parameter, value, room), tensor_parallel.padding_of(parameter, room, value)


def _refuse_shape(name: str, found: torch.Size, expected: torch.Size) -> None:
    if found != expected:
        raise ModelMismatchError(
            "an optimizer state has another shape than its parameter",
            found=tuple(found),
            expected=tuple(expected),
            where=name,
            helps="optimizers with factored state can be saved without hybrid_parallel in install(plugins=...)",
        )


def _working(optimizer: Any, stepped: torch.Tensor) -> Any:
    """The parameter that computes, of what the optimizer steps."""
    working = optimizer.get_master_to_working_map()
    return stepped if working is None else working[id(stepped)]


def _local_state(checkpoint_io: Any, optimizer: Any, stepped: torch.Tensor, state: State) -> State:
    """This rank's part of one parameter's state; of the master, the rows of padding also go into the weight."""
    parameter = _working(optimizer, stepped)
    local: State = {}
    rows = padding.fitting(parameter, MASTER, state.get(f"{MASTER}{PADDING}"))
    if rows is not None:
        _write_padding(parameter, rows)
    for name, value in state.items():
        if name.endswith(PADDING):
            continue
        if not isinstance(value, torch.Tensor) or name == "step":
            local[name] = value
            continue
        rows = padding.fitting(parameter, name, state.get(f"{name}{PADDING}"))
        cut = tensor_parallel.slice_of(parameter, value, rows)
        if checkpoint_io.use_zero:
            cut = _part(cut, checkpoint_io.global_dp_size, checkpoint_io.dp_rank)
        # As ColossalAI: moments are kept in the dtype of what is stepped.
        local[name] = torch.empty(cut.shape, dtype=stepped.dtype, device=stepped.device).copy_(cut)
    return local


def _part(value: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """This rank's part under ZeRO: flat, filled up with zeros, in equal parts (0.5.0,
    zero/low_level/low_level_optim.py: ``_create_master_param_current_rank``).
    """
    flat = value.reshape(-1)
    flat = nn.functional.pad(flat, [0, -len(flat) % size])
    return flat.view(size, -1)[rank]


def _write_padding(parameter: Any, rows: torch.Tensor) -> None:
    """Into the weight, the rows of padding, which are in no model's file."""
    whole = torch.zeros(tensor_parallel.whole_shape(parameter), dtype=parameter.dtype)
    given = tensor_parallel.slice_of(parameter, whole, rows).to(parameter.device)
    is_padding = tensor_parallel.is_padding(parameter)
    if is_padding is not None:
        parameter.data.copy_(torch.where(is_padding.to(given.device), given, parameter.data))


def _load_optimizer(
    checkpoint_io: Any, ranks: Ranks, optimizer: Any, groups: list[dict[str, Any]], states: Mapping[Any, State]
) -> None:
    """Take an optimizer's whole state, of any layout, after all ranks have found that it is one and fits."""
    live = optimizer.optim.param_groups
    ids = optimizer.param_info["param2id"]
    id_map = {ids[id(_working(optimizer, stepped))]: stepped for group in live for stepped in group["params"]}
    by_id = {int(key): state for key, state in states.items()}
    found: Digests = {}

    def look() -> str:
        if len(groups) != len(live):
            raise ModelMismatchError(
                "the optimizer state has other param groups", found=str(len(groups)), expected=str(len(live))
            )
        known = {key for group in optimizer.param_info["param_groups"] for key in group["params"]}
        if unknown := sorted(set(by_id) - known):
            raise ModelMismatchError(
                "the optimizer state is about other parameters",
                found=f"state of parameter {unknown[0]}",
                expected=f"{len(known)} parameters",
            )
        for key, stepped in id_map.items():
            shape = tensor_parallel.whole_shape(_working(optimizer, stepped))
            for name, value in by_id.get(key, {}).items():
                if isinstance(value, torch.Tensor) and name != "step" and not name.endswith(PADDING):
                    _refuse_shape(f"{name} of parameter {key}", value.shape, shape)
        found.update(digests({"param_groups": groups, "state": by_id}))
        return summary(found)

    summaries: Mapping[int, str | None] = ranks.same_call("load_optimizer", {}, look, _OPTIMIZER)
    refuse_different(ranks, summaries, found, _OPTIMIZER)
    for group, saved in zip(live, groups, strict=True):
        params = group["params"]
        group.clear()
        group.update(copy.deepcopy(saved), params=params)
    for stepped in id_map.values():
        optimizer.optim.state.pop(stepped, None)
    checkpoint_io.load_states_into_optimizer(optimizer, by_id, id_map)
    from colossalai.checkpoint_io.utils import sharded_optimizer_loading_epilogue

    sharded_optimizer_loading_epilogue(optimizer.optim)


def _load_model(ranks: Ranks, model: Any, entries: dict[str, Any], strict: bool) -> None:
    """Take a whole state dict, after all ranks have found that it fits the stages together.

    Raises:
        StateDictMismatchError: on all ranks; nothing is written.
    """
    module = model.unwrap()
    model._force_wait_all_gather()
    aliases = _aliases(ranks, model)
    offered = dict(entries)
    for names in aliases:
        given = next((name for name in names if name in entries), None)
        offered.update((name, entries[given]) for name in names if given is not None and name not in entries)
    found: Digests = {}

    def look() -> tuple[str, set[str]]:
        expected = _expected(module)
        if strict and (missing := [name for name in expected if name not in offered]):
            shown = ", ".join(f'"{name}"' for name in missing[:_SHOWN])
            raise ModelMismatchError(f"Missing key(s) in state_dict: {shown}", found=f"{len(missing)} of them")
        for name, shape in expected.items():
            if name in offered and offered[name].shape != shape:
                raise ModelMismatchError(
                    f"size mismatch for {name}", found=tuple(offered[name].shape), expected=tuple(shape)
                )
        found.update(digests(entries, own={name for name, _ in _persistent_buffers(module)}))
        return summary(found), set(expected)

    try:
        looked = ranks.same_call("load_model", {"strict": strict}, look, _MODEL)
        refuse_different(ranks, {rank: one for rank, (one, _) in looked.items()}, found, _MODEL)
    except ResumeRefusedError as error:
        raise StateDictMismatchError(str(error)) from error
    known = set().union(*(names for _, names in looked.values()), *aliases)
    unexpected = sorted(name for name in entries if name not in known and not name.endswith("_extra_state"))
    if strict and unexpected:
        shown = ", ".join(f'"{name}"' for name in unexpected[:_SHOWN])
        raise StateDictMismatchError(
            f"Unexpected key(s) in state_dict: {shown}", found=f"{len(unexpected)} of them",
            helps="strict=False loads the rest",
        )  # fmt: skip
    paddings = [(p, p.detach().clone(), tensor_parallel.is_padding(p)) for p in _padded(module)]
    module.load_state_dict({name: _own(value) for name, value in offered.items()}, strict=False)
    for parameter, before, is_padding in paddings:
        # ColossalAI would make them zero; a model's file says nothing about them.
        parameter.data.copy_(torch.where(is_padding.to(before.device), before, parameter.data))  # type: ignore[union-attr]
    model.update_master_params()


def _own(value: Any) -> Any:
    """A view: ColossalAI pads what it is given in place (0.5.0, tensor/padded_tensor/api.py: ``to_padded_tensor``)."""
    return value.view_as(value) if isinstance(value, torch.Tensor) else value


def _padded(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if tensor_parallel.padding_shape(parameter) is not None]


def _expected(module: nn.Module) -> dict[str, torch.Size]:
    """The names that this stage's module has, and the whole shapes."""
    named = module.named_parameters(remove_duplicate=False)
    shapes = {name: tensor_parallel.whole_shape(parameter) for name, parameter in named}
    return shapes | {name: buffer.shape for name, buffer in _persistent_buffers(module)}


def _aliases(ranks: Ranks, model: Any) -> list[set[str]]:
    """Sets of names that mean one parameter: on one stage, and of different stages (``shared_params``)."""
    names: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.unwrap().named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(name)
    stage = model.stage_manager.stage if model.stage_manager is not None else None
    across = [names.get(shared[stage], set()) if stage in shared else set() for shared in model.shared_params]
    groups = [set().union(*of_all) for of_all in zip(*ranks.gather(across).values(), strict=True)]
    return [*groups, *(some for some in names.values() if len(some) > 1 and not any(some & group for group in groups))]
