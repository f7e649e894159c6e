"""Presents any checkpoint to a job of torch's FSDP (`--use-torch-fsdp2 --ckpt-format torch_dcp`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from typing_extensions import override

from mcore_ckpt_ext.errors import ModelMismatchError, UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.formats.fsdp.writer import FsdpArray
from mcore_ckpt_ext.formats.param_group_assignment import group_that_holds
from mcore_ckpt_ext.formats.portable_state import PortableState, distinct_groups, known_arguments
from mcore_ckpt_ext.formats.torch_dcp.reader import NAME as TORCH_DCP
from mcore_ckpt_ext.formats.torch_dist.flattened import MODEL
from mcore_ckpt_ext.formats.unread_state import COMMON_KEYS
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_parameters import model_space_name
from mcore_ckpt_ext.layout.parameter_order import ObservedOrder
from mcore_ckpt_ext.megatron.live.compatibility import check_names, name_map_for
from mcore_ckpt_ext.megatron.live.model import Chunks
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain
from mcore_ckpt_ext.megatron.live.optimizer_adapters.inner_optimizers import kept_by
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.sources.dcp_storage_adapter import STEPS, DcpStorageAdapter
from mcore_ckpt_ext.model_space.names import is_extra_state
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.planning.plan import named_tensor
from mcore_ckpt_ext.storage.dtypes import with_torch_dtypes

# `check_checkpoint_args` compares these; such a job has only one layout, which determines them.
_LAYOUT_ARGUMENTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "padded_vocab_size")
_OPTIMIZER = "optimizer"


class TorchFsdpAdapter(DcpStorageAdapter):
    """One checkpoint for one load of torch's FSDP."""

    backend: ClassVar[str] = TORCH_DCP
    whose: ClassVar[str] = "torch's FSDP"
    exact: ClassVar[str] = "train in the precision that the checkpoint was written in"

    def __init__(self, session: LoadSession, arguments: Any, chunks: Chunks, optimizer: Any) -> None:
        folder = session.folder
        running = JobArguments.of(vars(arguments))
        self._optimizer = optimizer
        self._child = _only_child(optimizer)
        named = {
            key: (id(value), model_space_name(key, 0, 0, running))
            for chunk in chunks
            for key, value in chunk.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor) and not is_extra_state(key)
        }
        order = ObservedOrder("the live model", [[name for _, name in named.values()]])
        checkpoint = session.with_orders([order])
        spell = name_map_for(checkpoint, {name for _, name in named.values()}, running)
        super().__init__(session, checkpoint, running)
        self._weights = {f"{MODEL}{key}": spell(name) for key, (_, name) in named.items()}
        self._names = {number: spell(name) for number, name in named.values()}
        self._without = arguments.no_load_optim or arguments.finetune or folder.name == "release"
        state = PortableState.of(checkpoint, known_arguments(checkpoint.job.arguments()), megatron_version())
        self._common = {key: value for key, value in state.common.items() if key in COMMON_KEYS}
        self.arguments = self._common["args"]
        vars(self.arguments).update({name: getattr(arguments, name) for name in _LAYOUT_ARGUMENTS})
        self._groups = self._names_by_group()
        self._places = self._places_of_keys()

    @contextmanager
    def returning_state(self) -> Iterator[None]:
        """Let the optimizer return its state within this scope when the loader requests it."""

        def state_dict(is_loading: bool = False) -> Any:
            if is_loading and self._child.init_state_fn is not None:
                self._child.init_state_fn(self._child.optimizer, self._child.config)
            return self._child.state_dict()

        self._optimizer.state_dict = state_dict
        try:
            yield
        finally:
            del self._optimizer.state_dict

    @override
    def complete(self, state_dict: Mapping[str, Any]) -> None:
        """Set the options of each parameter group to the stored options of its parameters, with Adam's step."""
        if not self._without and self.checkpoint.optimizer.format() is not None:
            state = state_dict[_OPTIMIZER]
            for number, group in enumerate(state.get(_OPTIMIZER, state)["param_groups"]):
                group.update(with_torch_dtypes(self._settings(number)))

    def _settings(self, number: int) -> Mapping[str, Any]:
        """Return the stored options for the parameters of a live group.

        Raises:
            ModelMismatchError: the parameters were in several groups.
        """
        (groups,) = distinct_groups(self.checkpoint.optimizer.param_groups(), has_expert_optimizer=False)
        names = self._groups[number]
        shapes = {name: named_tensor(self.checkpoint, WEIGHT, name).shape for name in names}
        numbers = {
            group_that_holds(name, shape, groups, self.checkpoint.job.arguments()) for name, shape in shapes.items()
        }
        if len(numbers) > 1:
            raise ModelMismatchError(
                "parameters of one group of the running optimizer were in several ones",
                found=quantity(len(numbers), "group"),
                where=f"{names[0]}, {self._folder}",
                hint="resume with the optimizer arguments of the checkpoint",
            )
        return groups[numbers.pop()] if numbers else {}

    @override
    def arrays(self) -> Mapping[str, FsdpArray]:
        weights = {name: named_tensor(self.checkpoint, WEIGHT, name) for name in self.checkpoint.names(WEIGHT)}
        arrays = {}
        for key, (kind, name) in self._places.items():
            if (tensor := weights.get(name)) is not None:
                if kind != WEIGHT:
                    tensor = self.checkpoint.optimizer.state().logical_tensor(kind, name) if not self._without else None
                if tensor is not None:
                    arrays[key] = FsdpArray(key, tensor.shape, kind, tensor, 0)
        return arrays

    @override
    def objects(self) -> Mapping[str, Any]:
        objects: dict[str, Any] = {}
        for key, value in self._common.items():
            nested = isinstance(value, Mapping)
            objects.update({f"{key}.{name}": inner for name, inner in value.items()} if nested else {key: value})
        return objects

    @override
    def is_wanted(self, key: str, *, is_tensor: bool) -> bool:
        if not is_tensor:
            return key == STEPS and not self._without
        return key in self._places and (key.startswith(MODEL) or not self._without)

    @override
    def check_used(self, arrays: Mapping[str, FsdpArray], every: Set[str]) -> None:
        check_names(self.checkpoint, {name for _, name in self._places.values()})

    def _places_of_keys(self) -> dict[str, tuple[str, str]]:
        """Return the kind and the parameter's name that the job stores under each key."""
        places = {key: (WEIGHT, name) for key, name in self._weights.items()}
        for group, parameters in enumerate(self._halves):
            for position, parameter in enumerate(parameters):
                places[f"{_OPTIMIZER}.fp32_from_fp16_params.{group}.{position}"] = (
                    FP32_PARAM,
                    self._names[id(parameter)],
                )
        # The inner optimizer's state dict is nested in another one, unless the job trains in fp32.
        state = f"{_OPTIMIZER}.{_OPTIMIZER}.state" if self._halves else f"{_OPTIMIZER}.state"
        for number, name in enumerate(name for names in self._groups for name in names):
            places.update({f"{state}.{number}.{kind}": (kind, name) for kind in kept_by(self._child.optimizer) or ()})
        return places

    @property
    def _halves(self) -> Sequence[Sequence[Any]]:
        """The half-precision parameters in each live parameter group."""
        halves: Sequence[Sequence[Any]] = getattr(self._child, "float16_groups", [])
        return halves

    def _names_by_group(self) -> list[list[str]]:
        """Return the names of the parameters in each live parameter group, in their order."""
        masters = getattr(self._child, "fp32_from_float16_groups", [])
        by_master = {
            id(master): parameter
            for parameters, copies in zip(self._halves, masters, strict=True)
            for parameter, master in zip(parameters, copies, strict=True)
        }
        groups = self._child.optimizer.param_groups
        return [[self._names[id(by_master.get(id(tensor), tensor))] for tensor in group["params"]] for group in groups]


def _only_child(optimizer: Any) -> Any:
    """Return the only optimizer of whole parameters.

    Raises:
        UnsupportedCheckpointError: it is of another kind, or there are several.
    """
    chain = Chain.of(optimizer)
    if len(chain.whole) != 1 or chain.distributed or chain.unknown:
        raise UnsupportedCheckpointError(
            "this version does not support this kind of optimizer with torch's FSDP",
            found=type(optimizer).__name__,
            expected="one optimizer of whole parameters",
            hint="resume with --optimizer adam; or with --no-load-optim",
        )
    return chain.whole[0][0]
