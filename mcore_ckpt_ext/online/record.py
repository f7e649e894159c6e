"""The sidecar of a running job: the packing of its buffers, gathered once and written beside each checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.layout.digest import added, read, running_digest, written
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.sidecar import (
    RecordedBucket,
    RecordedDigests,
    RecordedGroup,
    RecordedParameter,
    SaveRecord,
    Sidecar,
)
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER
from mcore_ckpt_ext.online.agreement import gather
from mcore_ckpt_ext.online.homes.recognition import Chain, keeps_remainders
from mcore_ckpt_ext.online.live_model import LiveParameter, live_parameters


class PackingRecorder:
    """Gathers the packing of a job's gradient buffers once for each optimizer, and gives the sidecar of each save.

    Args:
        say: tells the user a line.
        versions: of this package, and of megatron-core.
    """

    def __init__(self, say: Callable[[str], None], versions: tuple[str, str]) -> None:
        self._say = say
        self._versions = versions
        self._groups: WeakKeyDictionary[Any, tuple[RecordedGroup, ...]] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[Any, Mapping[int, str] | None] = WeakKeyDictionary()

    def prepared(
        self, chunks: Callable[[], Sequence[Any]], optimizer: Any, arguments: Mapping[str, Any], iteration: int
    ) -> Callable[[SaveRecord], str]:
        """Returns what gives the sidecar's text once it is known how long a save took; a collective call.

        Args:
            chunks: gives the unwrapped model chunks.
            optimizer: what is saved; None where its packing need not be known.
            arguments: Megatron's arguments of the run.
            iteration: the iteration that is saved.
        """
        if optimizer is None:
            return lambda saved: ""
        if optimizer not in self._groups:
            live = chunks()
            self._groups[optimizer] = self._gathered(live, optimizer)
            self._names[optimizer] = self._names_to_digest(live, optimizer)
        digests = self._digested(optimizer)
        return lambda saved: self._text(self._groups[optimizer], arguments, iteration, saved, digests)

    def _gathered(self, chunks: Sequence[Any], optimizer: Any) -> tuple[RecordedGroup, ...]:
        try:
            own = recorded_groups(chunks, optimizer)
        except Exception as error:  # noqa: BLE001 - every rank must reach the gathering, and the save must not fail
            self._say(f"no sidecar for this job: {type(error).__name__}: {error}")
            own = []
        return merged(group for groups in gather(own) for group in groups)

    def _names_to_digest(self, chunks: Sequence[Any], optimizer: Any) -> Mapping[int, str] | None:
        """Names by `id` of parameters whose state has digests; None on every rank where none keeps remainders."""
        if not any(gather(any(map(keeps_remainders, Chain.of(optimizer).distributed)))):
            return None
        try:
            return {number: found.regions[0].name for number, found in live_parameters(chunks).items()}
        except Exception:  # noqa: BLE001 - reported where they are missed
            return {}

    def _digested(self, optimizer: Any) -> tuple[RecordedDigests, ...]:
        """The digests of this save's state, taken while it is being saved; of all its parts, or none."""
        names = self._names[optimizer]
        if names is None:
            return ()
        own: list[_Part] | None = None
        try:
            own = _parts(optimizer, names)
        except Exception as error:  # noqa: BLE001 - every rank must reach the gathering, and the save must not fail
            self._say(f"no digests of the optimizer's state in the sidecar: {type(error).__name__}: {error}")
        of_ranks = gather(own)
        return () if None in of_ranks else _joined(part for parts in of_ranks for part in parts or ())

    def _text(
        self,
        groups: tuple[RecordedGroup, ...],
        arguments: Mapping[str, Any],
        iteration: int,
        saved: SaveRecord,
        digests: tuple[RecordedDigests, ...],
    ) -> str:
        """The sidecar's text; empty where it cannot be made: a checkpoint without it is as good as before."""
        if not groups:
            return ""
        written_by, megatron = self._versions
        try:
            ranks = ParallelLayout.from_arguments(JobArguments.of(arguments))
            layout = {name: int(size) for name, size in asdict(ranks).items()}
            sidecar = Sidecar(f"mcore_ckpt_ext {written_by}", megatron, iteration, layout, groups, saved, digests)
            return sidecar.to_json()
        except Exception as error:  # noqa: BLE001 - see above
            self._say(f"no sidecar beside iteration {iteration}: {error}; resuming will recover the packing instead")
            return ""


_Place = tuple[int, int, str, str]  # child, group, name, kind


class _Part(NamedTuple):
    """What one rank holds of a parameter's state."""

    place: _Place
    digest: int


def _parts(optimizer: Any, names: Mapping[int, str]) -> list[_Part]:
    """Of what this rank saves; its device is waited for once."""
    places, digests = [], []
    for place, values, start in _held(optimizer, names):
        places.append(place)
        digests.append(running_digest(values, start))
    together = [digest.to(digests[0].device) for digest in digests]
    found = torch.stack(together).tolist() if together else []
    return [_Part(place, digest) for place, digest in zip(places, found, strict=True)]


def _held(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[_Place, torch.Tensor, int]]:
    """Remainders: what it is, its values as they are saved, and the element of the parameter at which they begin.

    The moments lie where the remainders do, and digests of them would cost four times as much.

    Source: `DistributedOptimizer._get_main_param_and_optimizer_states`, megatron/core/optimizer/distrib_optimizer.py,
    core_v0.12.1 to 0.19.2, which every format but the legacy one takes its values from.
    """
    for number, child in _first_instances(optimizer):
        for buckets in (found for ranges in child.gbuf_ranges for found in ranges.values()):
            for parameter, ranges in (item for bucket in buckets for item in bucket["param_map"].items()):
                group, order = child.model_param_group_index_map[parameter]
                state = child.optimizer.state.get(child.optimizer.param_groups[group]["params"][order], {})
                values, place = state.get("master_param"), (number, child.data_parallel_group_idx, names[id(parameter)])
                if values is not None and values.dtype == torch.int16:
                    yield (*place, PARAM_REMAINDER), values, ranges["param"].start


def _joined(parts: Iterable[_Part]) -> tuple[RecordedDigests, ...]:
    groups: dict[tuple[int, int], dict[str, dict[str, str]]] = {}
    for part in parts:
        child, group, name, kind = part.place
        kinds = groups.setdefault((child, group), {}).setdefault(name, {})
        kinds[kind] = written(added(read(kinds.get(kind, "0")), part.digest))
    return tuple(RecordedDigests(*place, parameters) for place, parameters in groups.items())


def _first_instances(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """The DistributedOptimizers by number; of several instances, which hold the same, the first."""
    found = Chain.of(optimizer).distributed
    for number, child in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        if child in found and getattr(child, "distributed_optimizer_instance_id", 0) == 0:
            yield number, child


def recorded_groups(chunks: Sequence[Any], optimizer: Any) -> list[RecordedGroup]:
    """This rank's part of the sidecar: the groups of which it is the first data-parallel rank.

    Attributes used, present from core_v0.7.0 to 0.19.2: `buffers`, `data_parallel_group_idx` of the
    DistributedOptimizer; `param_index_map`, `buckets` of its buffers (param_and_grad_buffer.py).
    """
    writers = [item for item in _first_instances(optimizer) if item[1].data_parallel_group.rank() == 0]
    live = live_parameters(chunks) if writers else {}
    return [
        RecordedGroup(number, (child.data_parallel_group_idx,), tuple(_buckets(child, live)))
        for number, child in writers
    ]


def _buckets(optimizer: Any, live: Mapping[int, LiveParameter]) -> Iterable[RecordedBucket]:
    for index, buffer in enumerate(optimizer.buffers):
        for bucket in buffer.buckets:
            parameters = [
                RecordedParameter(live[id(parameter)].regions[0].name, start - bucket.offset, stop - bucket.offset)
                for parameter, (start, stop, bucket_id) in buffer.param_index_map.items()
                if bucket_id == bucket.bucket_id
            ]
            yield RecordedBucket(
                buffer=index,
                dtypes=str((buffer.param_dtype, buffer.grad_dtype)),
                bucket=bucket.bucket_id,
                numel=bucket.grad_data.numel(),
                numel_unpadded=bucket.numel_unpadded,
                parameters=tuple(sorted(parameters, key=lambda parameter: parameter.start)),
            )


def merged(groups: Iterable[RecordedGroup]) -> tuple[RecordedGroup, ...]:
    """Groups with equal buffers (tensor-parallel siblings) become one entry."""
    indices: dict[tuple[int, tuple[RecordedBucket, ...]], set[int]] = {}
    for group in groups:
        indices.setdefault((group.child, group.buckets), set()).update(group.indices)
    return tuple(RecordedGroup(child, tuple(sorted(found)), buckets) for (child, buckets), found in indices.items())
