"""Digests of what a live job saves where its masters are remainders: taken where these lie, added up over all ranks.

The moments lie where the remainders do, and digests of them would cost four times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt_ext.collectives import attempt, gather, listed_of_all, text_of
from mcore_ckpt_ext.group_device import payload_device
from mcore_ckpt_ext.layout.additive_checksum import added, running_digest, written
from mcore_ckpt_ext.layout.sidecar import RecordedDigests
from mcore_ckpt_ext.megatron.live.model import live_parameters
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain, keeps_remainders
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER

Place = tuple[int, int, str]
"""The chained optimizer's number, `dp_group_idx`, and the parameter's name."""


class Digester:
    """Digests of one optimizer; the ranks agree once on what is digested, and a save exchanges one number for each."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any, say: Callable[[str], None]) -> None:
        """A collective call.

        Args:
            chunks: the unwrapped model chunks.
            optimizer: the live optimizer.
            say: tells the user a line.
        """
        self._say = say
        self._names: Mapping[int, str] = {}
        own: list[Place] = []

        def inspect_here() -> None:
            if any(map(keeps_remainders, Chain.of(optimizer).distributed)):
                live = live_parameters(chunks)
                self._names = {number: found.regions[0].name for number, found in live.items()}
                own.extend(place for place, _, _ in _held(optimizer, self._names))

        problem = attempt(inspect_here)  # every rank must reach the gathering, and the save must not fail
        of_ranks = gather((own, problem))
        if problems := listed_of_all([text for _, text in of_ranks]):
            self.complain(problems)
        self.places = [] if problems else sorted({place for found, _ in of_ranks for place in found})
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="digests")
        self._newest: Digests | None = None  # whose exchange must outlive this rank's save

    def begin(self, optimizer: Any, beside: bool) -> Digests:
        """Begin the digests of this save's remainders, which must not change until they are shared.

        Args:
            optimizer: what is saved.
            beside: whether a thread may take them meanwhile, which no other process is forked over.
        """
        own: Callable[[], torch.Tensor] | None = None
        if self.places:
            totals = torch.zeros(len(self.places) + 1, dtype=torch.int64, device=payload_device())
            if beside and totals.device.type == "cpu":
                own = self._beside.submit(self._add_own, optimizer, totals).result
            else:  # when it is shared: a device is not waited for, and a synchronous save may fork at any time
                own = partial(self._add_own, optimizer, totals)
        self._newest = Digests(self, own)
        return self._newest

    def complain(self, why: str) -> None:
        """Tell the user why there are none."""
        self._say(f"no digests of the optimizer's state in the sidecar: {why}")

    def _add_own(self, optimizer: Any, totals: torch.Tensor) -> torch.Tensor:
        """Add this rank's part to each place, and 1 to the last number where it has none."""
        try:
            totals[:-1] += self._own(optimizer, totals.device)
        except Exception as error:  # noqa: BLE001 - every rank must reach the sum, and the save must not fail
            self.complain(text_of(error))  # heard of the first rank only; of others, that there are such: `recorded`
            totals[-1] = 1
        return totals

    def _own(self, optimizer: Any, device: torch.device) -> torch.Tensor:
        """This rank's part of every digest."""
        numbers = {place: number for number, place in enumerate(self.places)}
        found: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for place, values, start in _held(optimizer, self._names):
            if values is not None and values.dtype == torch.int16:
                found.setdefault(values.device, []).append((numbers[place], running_digest(values, start)))
        totals = torch.zeros(len(self.places), dtype=torch.int64, device=device)
        for pairs in found.values():  # one copy from each device
            where, parts = zip(*pairs, strict=True)
            totals.index_add_(0, torch.tensor(where, device=device), torch.stack(parts).to(device))
        return totals


class Digests:
    """Those of one save: begun beside it, shared at its end, and known to whoever writes the sidecar later on."""

    def __init__(self, digester: Digester, own: Callable[[], torch.Tensor] | None) -> None:
        """`own`: waits for this rank's part of each place; None where there is nothing to digest."""
        self._digester, self._own = digester, own
        self._totals: torch.Tensor | None = None
        self._exchange: dist.Work | None = None

    def share(self) -> None:
        """Begin to add up the parts of all ranks; the remainders may change afterwards. A collective call."""
        if self._own is None or self._totals is not None:
            return
        self._totals = self._own()
        if dist.is_initialized():
            self._exchange = dist.all_reduce(self._totals, async_op=True)  # int64 wraps around, as digests do

    def recorded(self) -> tuple[RecordedDigests, ...]:
        """Wait for all ranks' parts, on any thread, once they are shared; none where a rank has failed."""
        if self._totals is None:
            return ()
        try:
            if self._exchange is not None:
                self._exchange.wait()
            *sums, failures = self._totals.tolist()
        except Exception as error:  # noqa: BLE001 - a checkpoint without digests is better than none
            self._digester.complain(text_of(error))
            return ()
        if failures:
            self._digester.complain(f"{failures} ranks could not take theirs")
            return ()
        groups: dict[tuple[int, int], dict[str, dict[str, str]]] = {}
        for (child, group, name), total in zip(self._digester.places, sums, strict=True):
            if total:  # what no rank has kept yet has none
                groups.setdefault((child, group), {})[name] = {PARAM_REMAINDER: written(added(total))}
        return tuple(RecordedDigests(*group, parameters) for group, parameters in groups.items())


def _held(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[Place, torch.Tensor | None, int]]:
    """What this rank saves: its place, its values where it has any yet, and the element at which they begin.

    Source: `DistributedOptimizer._get_main_param_and_optimizer_states`, megatron/core/optimizer/distrib_optimizer.py,
    core_v0.12.1 to 0.19.2, which every format but the legacy one takes its values from.
    """
    for number, child in first_instances(optimizer):
        for buckets in (found for ranges in child.gbuf_ranges for found in ranges.values()):
            for parameter, ranges in (item for bucket in buckets for item in bucket["param_map"].items()):
                group, order = child.model_param_group_index_map[parameter]
                stepped = child.optimizer.param_groups[group]["params"][order]
                values = child.optimizer.state.get(stepped, {}).get("master_param")
                yield (number, child.data_parallel_group_idx, names[id(parameter)]), values, ranges["param"].start


def first_instances(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """The DistributedOptimizers by number; of several instances, which hold the same, the first."""
    found = Chain.of(optimizer).distributed
    for number, child in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        if child in found and getattr(child, "distributed_optimizer_instance_id", 0) == 0:
            yield number, child
