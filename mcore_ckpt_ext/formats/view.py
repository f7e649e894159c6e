"""An open checkpoint as a value made of replaceable parts: other names, other weights, no optimizer.

`dataclasses.replace` makes such a view; parts that are not replaced are shared with the original. Everything else is
derived from the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_ckpt_ext.errors import UnknownNameError
from mcore_ckpt_ext.formats.evidence import Loading
from mcore_ckpt_ext.formats.lazy_tensor import TensorHandle, handle_of
from mcore_ckpt_ext.formats.parts import Files, Job, States, StoredOptimizer, StoredWeights, Weights, WholeModel
from mcore_ckpt_ext.layout.weight_spec import WeightSpec
from mcore_ckpt_ext.model_space.tensors import KINDS, PARAM_REMAINDER, WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.plan import Copies, Derivation, StoredSlice, derivation_of


@dataclass(frozen=True)
class OpenedFormat:
    """The format of an open checkpoint.

    Other modules use its traits in place of checks for a reader's class.

    Attributes:
        name: the name of the format.
        reader: the reader, for the modules of the format itself.
        notices: returns notes for a user who converts the given view of the checkpoint.
        with_weights_of: opens the checkpoint, an optimizer stored without weights, with the weights of another one;
            raises `UsageError` if this checkpoint has weights or the other one has none, and another `CheckpointError`
            if the weights do not belong to this optimizer, or nothing can verify that they do.
        with_weights_of_a_job: opens it with the weights of a live job, whose specifications it takes by model-space
            name.
        limit_to_legacy: returns the given view without the state that legacy files cannot contain.
        is_model_folder: whether it is a transformers folder, whose layer spec is chosen on opening.
        loading: how Megatron's own loader handles the format.
        foreign_writer: the software that wrote it, if not Megatron.
        is_of_convert: whether it is written only by conversions of this package.
        is_of_job: whether a job saves it, with a layout and an iteration; False for folders of weights alone.
        run_config: the content of `run_config.yaml` for Megatron-Bridge; None for a Megatron checkpoint.
        bridge_notices: notices for users of that content.
        starts_jobs: how Megatron starts a new job from the folder; empty if it cannot or resumes the old one.
        conversion: the command that converts the folder to a checkpoint that jobs can load.
    """

    name: str
    reader: object
    notices: Callable[[CheckpointView], list[str]]
    with_weights_of: Callable[[CheckpointView], CheckpointView]
    with_weights_of_a_job: Callable[[Mapping[str, WeightSpec]], CheckpointView]
    limit_to_legacy: Callable[[CheckpointView], CheckpointView] = lambda view: view
    is_model_folder: bool = False
    loading: Loading = Loading()
    foreign_writer: str = ""
    is_of_convert: bool = False
    is_of_job: bool = True
    run_config: Callable[[], str | None] = lambda: None
    bridge_notices: Callable[[], list[str]] = list
    starts_jobs: Callable[[], str] = str
    conversion: str = "mcore-ckpt convert SRC DST --to torch_dist"


@dataclass(frozen=True)
class Composition:
    """The models that a view consists of, if it is not one text model.

    Attributes:
        base_model: the model that the adapters are for, if that is another checkpoint.
        adapters_by_rank: whether the rows of both projections of a gated `linear_fc1` in the adapters are ordered by
            rank, as in ms-swift.
        whole_model: the text part of a vision-language model; None for others.
        merged_from: the base and the adapters of a merged model, one if they are in the same folder; else empty.
        merge_notes: notes for the user of a merged model.
    """

    base_model: CheckpointView | None = None
    adapters_by_rank: bool = False
    whole_model: WholeModel | None = None
    merged_from: Sequence[CheckpointView] = ()
    merge_notes: Sequence[str] = ()


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointView:
    """An open checkpoint.

    Attributes:
        format: its format, of which `name` is the name.
        files: the stored bytes: `folder`, `unread()` (keys that this package ignores) and the like.
        model: the weights.
        optimizer: the optimizer: `format()`, `param_groups()` and the like.
        job: the job that wrote it: `layout`, `iteration()`, `arguments()` and the like.
        states: extra states and random states.
        composition: the models that it consists of, if it is not one text model.
    """

    format: OpenedFormat
    files: Files
    model: StoredWeights
    optimizer: StoredOptimizer
    job: Job
    states: States
    composition: Composition = field(default_factory=Composition)

    def kinds(self) -> tuple[str, ...]:
        """Return all kinds in the checkpoint."""
        return (WEIGHT, *self.optimizer.kinds())

    def names(self, kind: str) -> list[str]:
        """Return the model-space names of one kind; none of a kind of Adam that the checkpoint lacks.

        Raises:
            UnknownNameError: there is no such kind.
        """
        if kind == WEIGHT:
            return self.model.weights().names()
        state = self.optimizer.state()
        if kind in state.kinds:
            return state.names(kind)
        if kind in (*KINDS, PARAM_REMAINDER):
            return []
        raise UnknownNameError(
            "there is no such kind of tensor",
            found=kind,
            expected=" or ".join(self.kinds()),
            where=str(self.files.folder),
        )

    def _source(self, kind: str) -> Weights | OptimizerState:
        return self.model.weights() if kind == WEIGHT else self.optimizer.state()

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """Return the name, shape and dtype of a tensor; None if the checkpoint does not contain it."""
        return self._source(kind).logical_tensor(kind, name)

    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """Return all slices that contain elements of a tensor."""
        return self._source(kind).stored_slices(kind, name)

    def copies(self, kind: str, name: str) -> Copies:
        """Return the parts of a tensor, the copies of each part, and the slices that hold each copy."""
        return self._source(kind).copies(kind, name)

    def derivation(self, kind: str, name: str) -> Derivation | None:
        """Return the derivation of a tensor; None if it is stored."""
        return derivation_of(self._source(kind), kind, name)

    def tensor(self, kind: str, name: str) -> TensorHandle:
        """Return the handle of one tensor.

        Raises:
            TypeError: kind or name is no text.
            UnknownNameError: the checkpoint does not contain it.
        """
        return handle_of(self, kind, name)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.format.name}, iteration {self.job.iteration()}, {self.files.folder}>"


def carried_kinds(checkpoint: CheckpointView) -> tuple[str, ...]:
    """Return the kinds from which all others can be derived."""
    return (WEIGHT, *checkpoint.optimizer.carried_kinds())
