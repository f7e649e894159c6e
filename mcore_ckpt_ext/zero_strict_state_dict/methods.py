"""The methods that ColossalAI's classes get, by patch or by subclass; both are made from the same functions here.

What a class had before stays in it as ``_non_strict_`` and its name: ``_non_strict_state_dict`` is the untouched
original.
"""

from __future__ import annotations

import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.online.agreement import agreed
from mcore_ckpt_ext.zero_strict_state_dict import optimizer as optimizer_state
from mcore_ckpt_ext.zero_strict_state_dict.loading import zero_strict_load_state_dict
from mcore_ckpt_ext.zero_strict_state_dict.shards import iter_zero_strict_state_dict
from mcore_ckpt_ext.zero_strict_state_dict.state import Precision, Ties, zero_strict_state_dict
from mcore_ckpt_ext.zero_strict_state_dict.together import agree

ORIGINAL = "_non_strict_"
_MIB = 1 << 20


class WrapperMethods:
    """For ZeroDDP and GeminiDDP."""

    _strict_dtype: Precision = "master"
    _strict_ties: Ties = "share"
    _non_strict_state_dict: Any
    _non_strict_state_dict_shard: Any
    _non_strict_load_state_dict: Any

    def state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False, only_rank_0: bool = True,
        dtype: Precision | None = None, *, strict: bool = True, device: torch.device | str = "cpu",
        ties: Ties | None = None,
    ) -> Any:  # fmt: skip
        """The state dict of the unwrapped module (`zero_strict_state_dict`); `strict=False` gives ColossalAI's own."""
        if strict:
            return zero_strict_state_dict(
                self, destination=destination, prefix=prefix, keep_vars=keep_vars, dtype=dtype or self._strict_dtype,
                only_rank_0=only_rank_0, device=device, ties=ties or self._strict_ties,
            )  # fmt: skip
        agree("state_dict(strict=False)", {"only_rank_0": only_rank_0}, lambda: None)
        # 0.3.0 to 0.3.3 know a dtype here.
        more = {} if dtype is None else {"dtype": dtype}
        return self._non_strict_state_dict(destination, prefix, keep_vars, only_rank_0, **more)

    def state_dict_shard(
        self, prefix: str = "", keep_vars: bool = False, max_shard_size: int = 1024, only_rank_0: bool = True,
        pinned_state_dicts: dict[str, Any] | None = None, dtype: Precision | None = None, *, strict: bool = True,
        ties: Ties | None = None,
    ) -> Iterator[tuple[OrderedDict[str, Any], float]]:  # fmt: skip
        """The strict state dict in shards of at most `max_shard_size` MiB; their sizes are told in bytes, as an index
        has them.
        """
        if not strict:
            agree("state_dict_shard(strict=False)", {"only_rank_0": only_rank_0}, lambda: None)
            yield from self._non_strict_state_dict_shard(prefix, keep_vars, max_shard_size, only_rank_0)
            return
        shards = iter_zero_strict_state_dict(
            self, int(max_shard_size * _MIB), prefix=prefix, dtype=dtype or self._strict_dtype,
            only_rank_0=only_rank_0, ties=ties or self._strict_ties,
        )  # fmt: skip
        for shard, size in shards:
            yield _pinned(shard, pinned_state_dicts), size

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load an ordinary state dict into the masters (`zero_strict_load_state_dict`)."""
        return zero_strict_load_state_dict(self, state_dict, strict)


class OptimizerMethods:
    """For GeminiOptimizer."""

    module: Any
    _non_strict_get_param_groups_for_saving: Any
    _non_strict_load_param_groups: Any
    optimizer_loading_epilogue: Any

    def state_dict(self, only_rank_0: bool = True) -> dict[str, Any]:
        """The whole state in model space; rank 0 of each ZeRO group has it, or all."""
        states = dict(optimizer_state.iter_states(self, only_rank_0, self._saves_masters()))
        received = {key: states[key] for key in sorted(states) if states[key] is not None}
        return {"param_groups": self.get_param_groups_for_saving(), "state": received}

    def state_shard(
        self, prefix: str = "", max_shard_size: int = 1024, only_rank_0: bool = True,
        pinned_state_dicts: dict[int, dict[str, Any]] | None = None,
    ) -> Iterator[tuple[OrderedDict[int, Any], float]]:  # fmt: skip
        """The state in shards of at most `max_shard_size` MiB, in the order of the chunks; sizes in bytes."""
        shard: OrderedDict[int, Any] = OrderedDict()
        size = 0
        for key, state in optimizer_state.iter_states(self, only_rank_0, self._saves_masters()):
            if state is None:
                continue
            cost = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
            if size and size + cost > max_shard_size * _MIB:
                yield shard, size
                shard, size = OrderedDict(), 0
            pinned = None if pinned_state_dicts is None else pinned_state_dicts.setdefault(key, {})
            shard[key] = _pinned(state, pinned)
            size += cost
        yield shard, size

    def get_param_groups_for_saving(self) -> list[dict[str, Any]]:
        """ColossalAI's param groups, with names and loss scale."""
        return optimizer_state.param_groups(self, self._non_strict_get_param_groups_for_saving())

    def load_param_groups(self, saved_param_groups: list[dict[str, Any]]) -> None:
        """ColossalAI's param groups, and the loss scale."""
        optimizer_state.load_groups(self, saved_param_groups, self._non_strict_load_param_groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a state dict of any layout, checked by all ranks before anything is written."""
        optimizer_state.load(self, state_dict)
        self.optimizer_loading_epilogue()

    def _saves_masters(self) -> bool:
        """Where the model's file is rounded, the optimizer's has the masters."""
        return getattr(self.module, "_strict_dtype", "master") not in ("master", torch.float32)


class CheckpointIOMethods:
    """For GeminiCheckpointIO, through which Booster saves and loads."""

    coordinator: Any
    _non_strict_save_unsharded_model: Any
    _non_strict_save_sharded_model: Any
    _non_strict_load_sharded_optimizer: Any
    _non_strict_load_unsharded_optimizer: Any

    def save_unsharded_model(self, model: Any, *positional: Any, **keywords: Any) -> Any:
        """As ColossalAI; safetensors, which know no shared storage, get tied tensors once."""
        original = self._non_strict_save_unsharded_model
        with _ties_fitting(original, model, positional, keywords):
            return original(model, *positional, **keywords)

    def save_sharded_model(self, model: Any, checkpoint_path: str, *positional: Any, **keywords: Any) -> Any:
        """As ColossalAI; and the config beside the files names the dtype that is in them."""
        original = self._non_strict_save_sharded_model
        with _ties_fitting(original, model, (checkpoint_path, *positional), keywords):
            result = original(model, checkpoint_path, *positional, **keywords)
        config = Path(checkpoint_path) / "config.json"
        if self.coordinator.is_master() and config.is_file() and model._strict_dtype != "compute":
            dtype = torch.float32 if model._strict_dtype == "master" else model._strict_dtype
            content = {**json.loads(config.read_text()), "torch_dtype": str(dtype).removeprefix("torch.")}
            config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        return result

    def load_unsharded_model(self, model: Any, checkpoint: str, strict: bool = True, *_: Any, **__: Any) -> None:
        """As ColossalAI; a file that one rank cannot read is refused by all."""
        model.load_state_dict(_read_by_all(lambda: [Path(checkpoint)]), strict=strict)

    def load_sharded_model(
        self, model: Any, checkpoint_index_file: Path, strict: bool = False, *_: Any, **__: Any
    ) -> None:
        """Load all files as one state dict, so that it is checked as a whole."""
        model.load_state_dict(_read_by_all(lambda: _files_of(Path(checkpoint_index_file))), strict=strict)

    def load_unsharded_optimizer(self, optimizer: Any, checkpoint: str, *more: Any, **keywords: Any) -> None:
        """As ColossalAI; a file that one rank cannot read is refused by all."""
        if str(checkpoint).endswith(".safetensors"):
            # Written asynchronously, with flattened names that ColossalAI knows to undo.
            self._non_strict_load_unsharded_optimizer(optimizer, checkpoint, *more, **keywords)
            return
        optimizer.load_state_dict(_read_by_all(lambda: [Path(checkpoint)]))

    def load_sharded_optimizer(self, optimizer: Any, checkpoint_index_file: Path, *more: Any, **keywords: Any) -> None:
        """Load all files as one state dict, so that it is checked as a whole."""
        index = Path(checkpoint_index_file)
        if index.name.endswith(".safetensors.index.json"):
            self._non_strict_load_sharded_optimizer(optimizer, checkpoint_index_file, *more, **keywords)
            return
        states = _read_by_all(lambda: _files_of(index))
        groups: list[Any] = []
        agreed("reading the param groups", lambda: groups.extend(_param_groups_beside(index)))
        optimizer.load_state_dict({"param_groups": groups, "state": states})


def namespace(methods: type, base: type, **settings: Any) -> dict[str, Any]:
    """What a class gets: our methods, settings, and its own methods under their second names."""
    ours = {name: value for name, value in vars(methods).items() if not name.startswith("__")}
    kept = {f"{ORIGINAL}{name}": original(base, name) for name in ours if callable(ours[name]) and hasattr(base, name)}
    return {**ours, **kept, **settings}


def original(base: type, name: str) -> Any:
    """A method of a class as ColossalAI wrote it, patched or not."""
    return getattr(base, f"{ORIGINAL}{name}", None) or getattr(base, name)


def _pinned(values: Any, pinned: dict[str, Any] | None) -> Any:
    """Values in the caller's pinned memory, made at the first time, as ColossalAI wants for asynchronous writing."""
    if pinned is None:
        return values
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            if name not in pinned:
                pinned[name] = torch.empty_like(value, device="cpu", pin_memory=torch.cuda.is_available())
            values[name] = pinned[name].copy_(value)
    return values


@contextmanager
def _ties_fitting(save: Any, model: Any, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[None]:
    """For the time of a save, leave out second names if the file is of safetensors (asynchronous ones always are)."""
    arguments = inspect.signature(save).bind(model, *positional, **keywords).arguments
    if arguments.get("use_safetensors") or arguments.get("use_async"):
        model._strict_ties = "omit"
    try:
        yield
    finally:
        model.__dict__.pop("_strict_ties", None)


def _read_by_all(files: Callable[[], list[Path]]) -> dict[Any, Any]:
    """All entries of some files, which are mapped, not read, until a value is needed.

    Raises:
        ResumeRefusedError: on all ranks, if one cannot read them.
    """
    entries: dict[Any, Any] = {}

    def read() -> None:
        for file in files():
            entries.update(_mapped(file))

    agreed("reading the checkpoint", read, "nothing is written")
    return entries


def _files_of(index: Path) -> list[Path]:
    """The files that an index names, in its order."""
    return [_beside(index, name) for name in dict.fromkeys(json.loads(index.read_text())["weight_map"].values())]


def _param_groups_beside(index: Path) -> list[Any]:
    file = _beside(index, json.loads(index.read_text())["metadata"]["param_groups"])
    return list(torch.load(file, weights_only=True))


def _beside(index: Path, name: str) -> Path:
    """A file that an index names.

    Raises:
        UnreadableCheckpointError: it is not there, or is named outside of the index's folder.
    """
    file = index.parent / name
    if Path(name).name != name or not file.is_file():
        raise UnreadableCheckpointError("a file of the checkpoint is not there", found=name, where=str(index))
    return file


def _mapped(file: Path) -> dict[Any, Any]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(file))
    return dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
