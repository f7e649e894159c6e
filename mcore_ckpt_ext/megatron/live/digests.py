"""Digests of a live optimizer's remainders, computed on their device and summed over all ranks.

Only remainders are digested: the moments lie on the same device, and would cost four times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt_ext.collectives import attempt, gather, list_reasons_of_all, text_of
from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.group_device import payload_device
from mcore_ckpt_ext.layout.additive_digest import digest_on_device, format_digest, join_digests
from mcore_ckpt_ext.layout.sidecar import RecordedDigests
from mcore_ckpt_ext.megatron.live.model import Chunks, live_parameters
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain, any_keeps_remainders
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER

Place = tuple[int, int, str]
"""The chained optimizer's number, `dp_group_idx`, and the parameter's name."""


class Digester:
    """Digests an optimizer; ranks agree once on parameters, and exchange a number for each in a save."""

    def __init__(self, chunks: Chunks, optimizer: Any, log: Callable[[str], None]) -> None:
        """Collect the parameters from all ranks. Collective.

        Args:
            chunks: the unwrapped model chunks.
            optimizer: the live optimizer.
            log: logs a line.
        """
        self._log = log
        self._names: Mapping[int, str] = {}
        places: list[Place] = []

        def inspect_here() -> None:
            if any_keeps_remainders(optimizer):
                live = live_parameters(chunks)
                self._names = {number: parameter.regions[0].name for number, parameter in live.items()}
                places.extend(place for place, _, _ in _saved_remainders(optimizer, self._names))

        problem = attempt(inspect_here)  # every rank must reach `gather`, and the save must not fail
        of_ranks = gather((places, problem))
        if problems := list_reasons_of_all([text for _, text in of_ranks]):
            self.report_failure(problems)
        self.places = [] if problems else sorted({place for of_rank, _ in of_ranks for place in of_rank})
        self._failed: torch.Tensor | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="digests")
        self._newest: Digests | None = None  # keeps the exchange alive beyond this rank's save

    def _reserve(self) -> bool:
        """Allocate once what a rank without memory sends in a save. Collective.

        Returns:
            False if a rank has no memory now.
        """
        if self._failed is not None:
            return True
        allocated: list[torch.Tensor] = []
        if problems := list_reasons_of_all(gather(attempt(lambda: allocated.append(self._zeros())))):
            self.report_failure(problems)
            return False
        (self._failed,) = allocated
        return True

    def _zeros(self) -> torch.Tensor:
        """Return a number for each place, and one that counts the ranks that fail."""
        return torch.zeros(len(self.places) + 1, dtype=torch.int64, device=payload_device())

    def begin(self, optimizer: Any, in_background: bool) -> Digests:
        """Begin the digests of this save's remainders. Collective.

        The remainders must not change until the digests are shared.

        Args:
            optimizer: the optimizer that is saved.
            in_background: a background thread may compute them meanwhile, since no other process is forked.
        """
        local_part: Callable[[], torch.Tensor] | None = None
        if self.places and self._reserve():
            if in_background and payload_device().type == "cpu":
                local_part = self._background.submit(self._add_own, optimizer).result
            else:  # computed in `share`: a device is asynchronous anyway, and a synchronous save may fork at any time
                local_part = partial(self._add_own, optimizer)
        self._newest = Digests(self, local_part)
        return self._newest

    def report_failure(self, why: str) -> None:
        """Log why there are no digests."""
        self._log(f"no digests of the optimizer's state in the sidecar: {why}")

    def _add_own(self, optimizer: Any) -> torch.Tensor:
        """Return this rank's part of each place, or 1 as the last number if it fails."""
        try:
            totals = self._zeros()
            totals[:-1] += self._own(optimizer, totals.device)
        except Exception as error:  # noqa: BLE001 - every rank must reach the sum, and the save must not fail
            # Logged on rank 0 only; `recorded` reports the number of failed ranks.
            self.report_failure(text_of(error))
            # Allocated by `_reserve`; after a failure only its last number is read.
            totals = self._failed  # type: ignore[assignment]
            totals[-1] = 1
        return totals

    def _own(self, optimizer: Any, device: torch.device) -> torch.Tensor:
        """Return this rank's part of every digest."""
        numbers = {place: number for number, place in enumerate(self.places)}
        by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for place, values, start in _saved_remainders(optimizer, self._names):
            if values is not None and values.dtype == torch.int16:
                by_device.setdefault(values.device, []).append((numbers[place], digest_on_device(values, start)))
        totals = torch.zeros(len(self.places), dtype=torch.int64, device=device)
        for pairs in by_device.values():  # one copy from each device
            where, parts = zip(*pairs, strict=True)
            totals.index_add_(0, torch.tensor(where, device=device), torch.stack(parts).to(device))
        return totals


class Digests:
    """The digests of one save: computed during it, shared at its end, read for the sidecar."""

    def __init__(self, digester: Digester, own: Callable[[], torch.Tensor] | None) -> None:
        """`own`: waits for this rank's part of each place and returns it; None if there is nothing to digest."""
        self._digester = digester
        self._own = own
        self._totals: torch.Tensor | None = None
        self._exchange: dist.Work | None = None

    def share(self) -> None:
        """Begin to sum up the parts of all ranks; the remainders may change afterwards. Collective."""
        if self._own is None or self._totals is not None:
            return
        self._totals = self._own()
        if dist.is_initialized():
            self._exchange = dist.all_reduce(self._totals, async_op=True)  # int64 wraps around, as digests do

    def recorded_digests(self) -> tuple[RecordedDigests, ...]:
        """Wait for the sum on any thread, after `share`; the result is empty if some rank has failed."""
        if self._totals is None:
            return ()
        try:
            if self._exchange is not None:
                self._exchange.wait()
            *sums, failures = self._totals.tolist()
        except Exception as error:  # noqa: BLE001 - a checkpoint without digests is better than none
            self._digester.report_failure(text_of(error))
            return ()
        if failures:
            self._digester.report_failure(f"{quantity(failures, 'rank')} could not take theirs")
            return ()
        groups: dict[tuple[int, int], dict[str, dict[str, str]]] = {}
        for (child, group, name), total in zip(self._digester.places, sums, strict=True):
            if total:  # a total of zero means that no rank has remainders yet
                groups.setdefault((child, group), {})[name] = {PARAM_REMAINDER: format_digest(join_digests(total))}
        return tuple(RecordedDigests(*group, parameters) for group, parameters in groups.items())


def _saved_remainders(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[Place, torch.Tensor | None, int]]:
    """Yield for each remainder that this rank saves its place, its values if any, and its first element.

    Source: `DistributedOptimizer._get_main_param_and_optimizer_states`, megatron/core/optimizer/distrib_optimizer.py,
    core_v0.12.1 to 0.19.2, from which every format but the legacy one takes its values.
    """
    for number, child in first_instances(optimizer):
        for buckets in (of_dtype for ranges in child.gbuf_ranges for of_dtype in ranges.values()):
            for parameter, ranges in (item for bucket in buckets for item in bucket["param_map"].items()):
                group, order = child.model_param_group_index_map[parameter]
                stepped = child.optimizer.param_groups[group]["params"][order]
                values = child.optimizer.state.get(stepped, {}).get("master_param")
                yield (number, child.data_parallel_group_idx, names[id(parameter)]), values, ranges["param"].start


def first_instances(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """Yield the DistributedOptimizers with their numbers; of several equal instances only the first."""
    distributed = Chain.of(optimizer).distributed
    for number, child in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        if child in distributed and getattr(child, "distributed_optimizer_instance_id", 0) == 0:
            yield number, child
