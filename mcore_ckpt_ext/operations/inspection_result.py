"""The result of an inspection, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_ckpt_ext.formats.accounts import Account
from mcore_ckpt_ext.operations.pipeline_map import Stage
from mcore_ckpt_ext.operations.resumptions import Resumption, Writer
from mcore_ckpt_ext.operations.short_repr import ShortRepr


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the model or of its optimizer.

    Attributes:
        kind: what it holds of a parameter: `weight`, `fp32_param`, `exp_avg`, and so on.
        name: the name of the parameter.
        shape: its complete shape, in elements.
        dtype: the dtype in which it is stored.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class StoredFile:
    """A file and its content.

    Attributes:
        file: its name.
        rank: the global rank that wrote it; None if the name does not contain it.
        writer: the number of that rank's writer.
        place: the rank's place in the layout, in words.
        bytes_on_disk: its size; None if the file is missing.
        records: the number of arrays or parts of arrays in it.
        bytes_by_kind: the size of the arrays in it, by kind.
        tensors: the arrays of which it holds a part, as its format names them.
    """

    file: str
    rank: int | None
    writer: int | None
    place: str
    bytes_on_disk: int | None
    records: int = 0
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BufferMap:
    """The packing of one flat array.

    Attributes:
        group: the name of the optimizer and of the data-parallel group that share it.
        buffer: the name of its bucket: the gradient buffer, the dtypes of parameters and gradients, and its number.
        numel: the number of elements of the array.
        order_source: what proposed the packing, with which sizes and chunk borders agree; empty if no proposal fits.
        parameters: of each parameter: (name, first element, end).
    """

    group: str
    buffer: str
    numel: int
    order_source: str
    parameters: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, repr=False)
class Inspection(ShortRepr):
    """Everything that `inspect` reports; sizes in bytes.

    Attributes:
        path: the folder of the iteration.
        format: the format of the checkpoint.
        iteration: the iteration; None for a model to start from.
        layout: the sizes of the job that saved the checkpoint, or the source of its conversion, by dimension; a size is
            None if it is unknown.
        layout_text: the same in words; empty if no job saved either.
        writer: the release that wrote the checkpoint, and the evidence.
        optimizer_format: the format of the optimizer's state; None without an optimizer.
        optimizer: the optimizer, in words.
        model: properties of the model, by label.
        training: learning rate, step and consumed samples, by label; a list where groups of parameters differ.
        bytes_on_disk: the size of all files.
        bytes_by_kind: the size of the tensors of each kind.
        files: the files that hold tensors.
        silent_ranks: ranks of the layout that wrote no file.
        why_silent: why they wrote none; empty if there are no such ranks.
        resumptions: the programs that resume the checkpoint with its optimizer.
        sidecar: whether the checkpoint has a readable sidecar of this package.
        sidecar_problem: why the sidecar cannot be read; None if it can, or there is none.
        tensors: the tensors of the model and of the optimizer.
        buffers: the packing of flat arrays, if requested.
        stages: the layers and parameters of each pipeline stage.
        account: the stored keys that this package reads, and those that it does not.
        described_by: the file that describes the job of a checkpoint without Megatron's arguments; empty without one.
        unbelieved: wrong statements of such a file.
        data: how the job read its data, in words; empty if unknown.
    """

    schema: int
    path: str
    format: str
    iteration: int | None
    layout: Mapping[str, int | None]
    layout_text: str
    writer: Writer
    optimizer_format: str | None
    optimizer: str
    model: Mapping[str, int | float | str]
    training: Mapping[str, int | float | list[int | float]]
    bytes_on_disk: int
    bytes_by_kind: Mapping[str, int]
    files: tuple[StoredFile, ...]
    silent_ranks: tuple[int, ...]
    why_silent: str
    resumptions: tuple[Resumption, ...]
    sidecar: bool
    sidecar_problem: str | None
    tensors: tuple[StoredTensor, ...]
    buffers: tuple[BufferMap, ...]
    stages: tuple[Stage, ...] = ()
    account: Account = field(default_factory=Account)
    described_by: str = ""
    unbelieved: tuple[str, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
