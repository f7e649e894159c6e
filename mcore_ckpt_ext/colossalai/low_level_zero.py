"""LowLevelZeroPlugin, ZeRO stages 1 and 2: saves masters and loss scale for exact resumes.

ColossalAI (0.5.0, zero/low_level/low_level_optim.py) gathers the moments to save them and shards them again under any
number of ranks, but saves neither the fp32 masters nor the loss scale: after a resume the masters are the rounded
weights. Here the masters are an additional state of each parameter, which ColossalAI's own code gathers and shards.
Stock ColossalAI loads such files, too: its optimizer ignores the entry.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from mcore_ckpt_ext.colossalai import master_state
from mcore_ckpt_ext.colossalai.asynchronous import former_save_finished
from mcore_ckpt_ext.colossalai.master_state import masters_in_state, take
from mcore_ckpt_ext.colossalai.ranks import Ranks
from mcore_ckpt_ext.colossalai.replaced import ReplacedMethods


class LowLevelZeroMethods(ReplacedMethods):
    """Methods that replace those of LowLevelZeroOptimizer."""

    def state_dict(self, *positional: Any, **keywords: Any) -> dict[str, Any]:
        """Return ColossalAI's dict, with the masters and the loss scale; all ranks must call this."""
        with masters_in_state(self):
            return dict(self._non_strict_state_dict(*positional, **keywords))

    def state_dict_shard(self, *positional: Any, **keywords: Any) -> Generator[tuple[dict[int, Any], int]]:
        """Yield ColossalAI's shards, with the masters."""
        with masters_in_state(self):
            yield from self._non_strict_state_dict_shard(*positional, **keywords)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like ColossalAI, with the masters and the loss scale if the dict has them."""
        with _same_groups(self):
            self._non_strict_load_state_dict(state_dict)
        take(self)

    update_master_params = master_state.update_master_params


class LowLevelZeroCheckpointIOMethods(ReplacedMethods):
    """Methods for LowLevelZeroCheckpointIO, whose sharded files bypass the optimizer's methods."""

    def save_unsharded_optimizer(
        self, optimizer: Any, checkpoint: str, gather_dtensor: bool = False, use_async: bool = False
    ) -> None:
        """Save like ColossalAI; the optimizer's `state_dict` has the masters and the loss scale."""
        with former_save_finished(self, optimizer, Ranks(), checkpoint, use_async=use_async):
            self._non_strict_save_unsharded_optimizer(optimizer, checkpoint, gather_dtensor, use_async)

    def save_sharded_optimizer(
        self,
        optimizer: Any,
        checkpoint: str,
        gather_dtensor: bool = False,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Save like ColossalAI, with the masters and the loss scale."""
        from colossalai.checkpoint_io.utils import get_optimizer_base_filenames

        base, index, _ = get_optimizer_base_filenames(prefix, use_async)
        finished = former_save_finished(self, optimizer, Ranks(), checkpoint, (base, index), use_async)
        with finished, masters_in_state(optimizer):
            self._non_strict_save_sharded_optimizer(
                optimizer, checkpoint, gather_dtensor, prefix, size_per_shard, use_async
            )

    def load_sharded_optimizer(self, optimizer: Any, *positional: Any, **keywords: Any) -> None:
        """Load like ColossalAI, with the masters and the loss scale if the files have them."""
        with _same_groups(optimizer):
            self._non_strict_load_sharded_optimizer(optimizer, *positional, **keywords)
        take(optimizer)


@contextmanager
def _same_groups(optimizer: Any) -> Iterator[None]:
    """Load param groups into the present dicts, which torch would replace.

    ColossalAI replaces Lamb, CAME and Adafactor by optimizers of its own (0.5.0, nn/optimizer/__init__.py:
    ``cast_to_distributed``), which have only these dicts in common with the optimizer that a scheduler steps.
    """
    groups = list(optimizer.optim.param_groups)
    yield
    loaded = [dict(group) for group in optimizer.optim.param_groups]
    for group, content in zip(groups, loaded, strict=True):
        group.clear()
        group.update(content)
    optimizer.optim.param_groups[:] = groups
