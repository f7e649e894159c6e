"""The methods of Gemini's classes: the wrapper, the optimizer, and the files that Booster writes."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt_ext.colossalai import optimizer as optimizer_state
from mcore_ckpt_ext.colossalai.asynchronous import (
    consumer_errors_reported,
    former_save_finished,
    pinned_copy,
    write_model,
)
from mcore_ckpt_ext.colossalai.files import Files, write_one, write_sharded
from mcore_ckpt_ext.colossalai.loading import zero_strict_load_state_dict
from mcore_ckpt_ext.colossalai.reading import load_states, read_by_all, read_optimizer_by_all, read_sharded_by_all
from mcore_ckpt_ext.colossalai.replaced import ReplacedMethods, keeps_signature
from mcore_ckpt_ext.colossalai.shards import iter_shards, state_dict_shards
from mcore_ckpt_ext.colossalai.state import Precision, StateDictOptions, Ties, precision_of, zero_strict_state_dict
from mcore_ckpt_ext.colossalai.wrapper import inspect_wrapper

_MIB = 1 << 20


class WrapperMethods(ReplacedMethods):
    """Methods for ZeroDDP and GeminiDDP."""

    _strict_dtype: Precision = "master"
    _strict_ties: Ties = "share"

    @keeps_signature
    def state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False, only_rank_0: bool = True,
        *fifth: Any, dtype: Precision | None = None, strict: bool = True, device: torch.device | str = "cpu",
        ties: Ties | None = None,
    ) -> Any:  # fmt: skip
        """Return the state dict of the unwrapped module (`zero_strict_state_dict`).

        `strict=False` returns ColossalAI's own. The fifth positional argument is `strict` if it is a bool, as
        ColossalAI once had it (hpcaitech/ColossalAI #2363), else `dtype`, as in 0.3.0 to 0.3.3.
        """
        if len(fifth) > 1:
            raise TypeError(f"state_dict() takes at most 5 positional arguments, {4 + len(fifth)} were given")
        if fifth and isinstance(fifth[0], bool):
            strict = fifth[0]
        elif fifth:
            dtype = fifth[0]
        if strict:
            return zero_strict_state_dict(
                self, destination=destination, prefix=prefix, keep_vars=keep_vars, dtype=_precision(self, dtype),
                only_rank_0=only_rank_0, device=device, ties=ties or self._strict_ties,
            )  # fmt: skip
        _same_call(self, "state_dict(strict=False)", only_rank_0=only_rank_0)
        # Only 0.3.0 to 0.3.3 have a dtype here.
        more = {} if dtype is None else {"dtype": dtype}
        return self._non_strict_state_dict(destination, prefix, keep_vars, only_rank_0, **more)

    @keeps_signature
    def state_dict_shard(
        self, prefix: str = "", keep_vars: bool = False, max_shard_size: int = 1024, only_rank_0: bool = True,
        pinned_state_dicts: dict[str, Any] | None = None, dtype: Precision | None = None, *, strict: bool = True,
        ties: Ties | None = None,
    ) -> Generator[tuple[OrderedDict[str, Any], int]]:  # fmt: skip
        """Yield the strict state dict in shards of at most `max_shard_size` MiB, each with its size in bytes."""
        if not strict:
            _same_call(self, "state_dict_shard(strict=False)", only_rank_0=only_rank_0)
            yield from self._non_strict_state_dict_shard(prefix, keep_vars, max_shard_size, only_rank_0)
            return
        options = StateDictOptions(_precision(self, dtype), only_rank_0, prefix=prefix, ties=ties or self._strict_ties)
        yield from state_dict_shards(self, int(max_shard_size * _MIB), options, pinned_state_dicts)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load an ordinary state dict into the masters (`zero_strict_load_state_dict`)."""
        return zero_strict_load_state_dict(self, state_dict, strict)


class OptimizerMethods(ReplacedMethods):
    """Methods for GeminiOptimizer."""

    def state_dict(self, only_rank_0: bool = True) -> dict[str, Any]:
        """Return the whole state in model space, on rank 0 of each ZeRO group, or on all ranks."""
        gathered = optimizer_state.GatheredState(self, only_rank_0)
        states = dict(gathered)
        received = {key: states[key] for key in sorted(states) if states[key] is not None}
        return {"param_groups": gathered.param_groups(), "state": received}

    def state_shard(
        self, prefix: str = "", max_shard_size: int = 1024, only_rank_0: bool = True,
        pinned_state_dicts: dict[int, dict[str, Any]] | None = None,
    ) -> Generator[tuple[OrderedDict[int, Any], int]]:  # fmt: skip
        """Yield the state in shards of at most `max_shard_size` MiB, in the order of the chunks.

        Each comes with its size in bytes. They lack padding rows; ColossalAI's asynchronous saves use this method, so
        that they do not save them.
        """
        yield from _state_shards(optimizer_state.GatheredState(self, only_rank_0), max_shard_size, pinned_state_dicts)

    def get_param_groups_for_saving(self) -> list[dict[str, Any]]:
        """Return ColossalAI's param groups, with names and loss scale."""
        return optimizer_state.param_groups(self, self._non_strict_get_param_groups_for_saving())

    def load_param_groups(self, saved_param_groups: list[dict[str, Any]]) -> None:
        """Load ColossalAI's param groups, and the loss scale."""
        optimizer_state.load_groups(self, saved_param_groups, self._non_strict_load_param_groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict saved under any layout; all ranks check it before anything is written."""
        optimizer_state.load(self, state_dict)
        self.optimizer_loading_epilogue()

    def _saves_masters(self) -> bool:
        """Return True if the optimizer's file contains the masters, because the model's file is rounded."""
        return getattr(self.module, "_strict_dtype", "master") not in ("master", torch.float32)


class CheckpointIOMethods(ReplacedMethods):
    """Methods for GeminiCheckpointIO, through which Booster saves and loads."""

    def save_unsharded_model(
        self, model: Any, checkpoint: str, gather_dtensor: bool = True, use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:  # fmt: skip
        """Save the model like ColossalAI, but atomically; in safetensors tied tensors are stored once."""
        state = model.state_dict(ties="omit" if use_safetensors or use_async else None)
        ranks = inspect_wrapper(model).ranks
        if use_async:
            write_model(self, model, ranks, Path(checkpoint), state)
        else:
            write_one(Path(checkpoint), state, ranks)

    def save_sharded_model(
        self, model: Any, checkpoint_path: str, gather_dtensor: bool = False, prefix: str | None = None,
        max_shard_size: int = 1024, use_safetensors: bool = False, use_async: bool = False,
    ) -> None:  # fmt: skip
        """Save the model like ColossalAI, but atomically; config.json names the dtype of the files."""
        from colossalai.checkpoint_io.utils import get_model_base_filenames

        names = get_model_base_filenames(prefix, use_safetensors)
        ranks = inspect_wrapper(model).ranks
        if use_async:
            finished = former_save_finished(self, model, ranks, checkpoint_path, names)
            with finished, _ties_omitted(model), consumer_errors_reported(model, "state_dict_shard"):
                self._non_strict_save_sharded_model(
                    model, checkpoint_path, gather_dtensor, prefix, max_shard_size, use_safetensors, use_async
                )
            if ranks.is_writer():
                _write_config(model, Path(checkpoint_path))
            return
        shards = model.state_dict_shard(max_shard_size=max_shard_size, ties="omit" if use_safetensors else None)

        def add_config(files: Files) -> dict[str, Any]:
            files.add_folder(partial(_write_config, model))
            return {}

        write_sharded(Path(checkpoint_path), names, shards, ranks, add_config)

    def save_unsharded_optimizer(
        self, optimizer: Any, checkpoint: str, gather_dtensor: bool = True, use_async: bool = False
    ) -> None:
        """Save the optimizer like ColossalAI, but atomically."""
        ranks = inspect_wrapper(optimizer.module).ranks
        if use_async:
            with former_save_finished(self, optimizer, ranks, checkpoint):
                # It has the names and sizes of the first save, before the first step perhaps (0.5.0).
                self.pinned_state_dicts.pop(id(optimizer), None)
                self._non_strict_save_unsharded_optimizer(optimizer, checkpoint, gather_dtensor, use_async)
            return
        write_one(Path(checkpoint), optimizer.state_dict(), ranks)

    def save_sharded_optimizer(
        self, optimizer: Any, checkpoint: str | Path, gather_dtensor: bool = True, prefix: str | None = None,
        size_per_shard: int = 1024, use_async: bool = False,
    ) -> None:  # fmt: skip
        """Save the optimizer like ColossalAI, but atomically."""
        from colossalai.checkpoint_io.utils import get_optimizer_base_filenames

        base, index, groups = get_optimizer_base_filenames(prefix, use_async)
        ranks = inspect_wrapper(optimizer.module).ranks
        if use_async:
            finished = former_save_finished(self, optimizer, ranks, checkpoint, (base, index))
            with finished, consumer_errors_reported(optimizer, "state_shard"):
                self._non_strict_save_sharded_optimizer(
                    optimizer, checkpoint, gather_dtensor, prefix, size_per_shard, use_async
                )
            return
        gathered = optimizer_state.GatheredState(optimizer)
        shards = _state_shards(gathered, size_per_shard, None)

        def add_groups(files: Files) -> dict[str, Any]:
            files.add(groups, partial(torch.save, gathered.param_groups()))
            return {"param_groups": groups}

        write_sharded(Path(checkpoint), (base, index), shards, ranks, add_groups)

    def load_unsharded_model(self, model: Any, checkpoint: str, strict: bool = True, *_: Any, **__: Any) -> None:
        """Load the model like ColossalAI; all ranks refuse a file that one rank cannot read."""
        model.load_state_dict(read_by_all(inspect_wrapper(model).ranks, Path(checkpoint)), strict=strict)

    def load_sharded_model(
        self, model: Any, checkpoint_index_file: Path, strict: bool = False, *_: Any, **__: Any
    ) -> None:
        """Load all files as one state dict, so that it is checked as a whole."""
        model.load_state_dict(
            read_sharded_by_all(inspect_wrapper(model).ranks, Path(checkpoint_index_file)), strict=strict
        )

    def load_unsharded_optimizer(self, optimizer: Any, checkpoint: str, *_: Any, **__: Any) -> None:
        """Load the optimizer like ColossalAI; all ranks refuse a file that one rank cannot read."""
        optimizer.load_state_dict(read_by_all(inspect_wrapper(optimizer.module).ranks, Path(checkpoint), load_states))

    def load_sharded_optimizer(self, optimizer: Any, checkpoint_index_file: Path, *_: Any, **__: Any) -> None:
        """Load all files as one state dict, so that it is checked as a whole."""
        ranks = inspect_wrapper(optimizer.module).ranks
        optimizer.load_state_dict(read_optimizer_by_all(ranks, Path(checkpoint_index_file)))


def _state_shards(
    gathered: optimizer_state.GatheredState, max_shard_size: int, pinned: dict[int, dict[str, Any]] | None
) -> Generator[tuple[OrderedDict[int, Any], int]]:
    def entries() -> Iterator[tuple[dict[int, Any], int]]:
        for key, state in gathered:
            if state is not None:
                size = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
                memory = None if pinned is None else pinned.setdefault(key, {})
                yield {key: gathered.errors.attempt(partial(pinned_copy, state, memory))}, size

    yield from iter_shards(entries(), max_shard_size * _MIB, gathered.errors)


def _precision(model: Any, dtype: Precision | None = None) -> Precision:
    """Return a dtype, or that of `install`; its "master" means the trained values without masters."""
    if dtype is None and model._strict_dtype != "master":
        dtype = model._strict_dtype
    return precision_of(model, dtype)


def _same_call(model: Any, call: str, **arguments: object) -> None:
    inspect_wrapper(model).ranks.same_call(call, arguments, lambda: None)


@contextmanager
def _ties_omitted(model: Any) -> Iterator[None]:
    """Leave out second names during an asynchronous save, which writes safetensors."""
    model._strict_ties = "omit"
    try:
        yield
    finally:
        model.__dict__.pop("_strict_ties", None)


def _write_config(model: Any, folder: Path) -> None:
    """Write the config of a Hugging Face model as ColossalAI does, with the dtype of the files."""
    from colossalai.checkpoint_io.utils import save_config_file

    save_config_file(model.unwrap(), str(folder))
    config = folder / "config.json"
    precision = _precision(model)
    if config.is_file() and precision != "compute":
        dtype = torch.float32 if precision == "master" else precision
        content = {**json.loads(config.read_text()), "torch_dtype": str(dtype).removeprefix("torch.")}
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
