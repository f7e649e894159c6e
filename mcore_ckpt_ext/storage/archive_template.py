"""Where the elements of stored arrays lie: looked up once, and cheaply where one archive is like another."""

from __future__ import annotations

import threading
from collections import OrderedDict

from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.planning.array_location import ArchivedRecord, ArchivedTensor, PlainExtent, RawArray
from mcore_ckpt_ext.storage.checksums import Checksums
from mcore_ckpt_ext.storage.dtypes import dtype_named
from mcore_ckpt_ext.storage.files import FolderReader, cut_short
from mcore_ckpt_ext.storage.pickle_stubs import Placeholder
from mcore_ckpt_ext.storage.tensor_location import ArchiveTemplate, TensorLocation
from mcore_ckpt_ext.storage.tensor_reference import Float8Reference, StorageReference, TensorReference
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

_OPEN_ARCHIVES = 32
# Tensors of one size have a few shapes; models have a few sizes.
_STENCILS_OF_A_SIZE, _SIZES = 4, 1024


class TensorLocations:
    """The payloads of one checkpoint folder; safe to use from several threads.

    Args:
        reader: of the folder.
        checksums: take notice of what is looked up. Whoever publishes what was read must compare them: its own would
            hide the damage, and nothing else shows that of a moment.
    """

    def __init__(self, reader: FolderReader, checksums: Checksums | None = None) -> None:
        self._reader, self._checksums = reader, checksums
        self._payloads: dict[tuple[str, int, str], TensorLocation] = {}
        self._archives: OrderedDict[tuple[str, int], TorchArchive] = OrderedDict()
        self._stencils: dict[tuple[int, str], list[ArchiveTemplate]] = {}
        self._lock = threading.Lock()

    def locate(self, extent: PlainExtent) -> TensorLocation:
        """Where the elements of a stored array lie.

        Raises:
            UnreadableCheckpointError: what is stored there is not the array that the metadata describes.
        """
        place = (extent.file, extent.offset, extent.record if isinstance(extent, ArchivedRecord) else "")
        with self._lock:
            known = self._payloads.get(place)
        if known is None:
            known = self._look_up(extent)
            with self._lock:
                is_new = place not in self._payloads
                self._payloads[place] = known
            if is_new and self._checksums is not None:
                self._show(extent, known, self._checksums)
        return known

    def _show(self, extent: PlainExtent, payload: TensorLocation, checksums: Checksums) -> None:
        """Have checksums compared."""
        if isinstance(extent, RawArray):
            checksums.look_at_array(payload, extent)
        elif isinstance(extent, ArchivedRecord):
            archive = self.archive(extent.file, extent.offset, extent.length)
            checksums.add_records(payload, archive, [f"data/{extent.record}"])
        else:
            archive = TorchArchive(self._reader, extent.file, extent.offset, extent.length)
            checksums.add_records(payload, archive, archive.names)

    def archive(self, file: str, offset: int = 0, length: int | None = None) -> TorchArchive:
        """An archive of many objects; the directories of the latest are kept, since each may list thousands of records.

        Raises:
            UnreadableCheckpointError: there is no whole archive at that place.
        """
        place = (file, offset)
        with self._lock:
            found = self._archives.pop(place, None)
        if found is None:
            found = TorchArchive(self._reader, file, offset, length)
        with self._lock:
            self._archives[place] = found
            while len(self._archives) > _OPEN_ARCHIVES:
                self._archives.popitem(last=False)
        return found

    def _look_up(self, extent: PlainExtent) -> TensorLocation:
        if isinstance(extent, RawArray):
            return self._raw(extent)
        if isinstance(extent, ArchivedTensor):
            return self._by_stencil(extent) or self._in_archive_of_its_own(extent)
        archive = self.archive(extent.file, extent.offset, extent.length)
        storage = StorageReference(dtype_named(extent.dtype), extent.record, extent.numel)
        tensor = TensorReference(storage, 0, (extent.numel,), (1,))
        return _of_its_size(archive.payload(tensor), extent, archive)

    def _raw(self, extent: RawArray) -> TensorLocation:
        size = self._reader.size(extent.file)
        if size < extent.offset + extent.length:
            raise cut_short(self._reader.folder / extent.file, size, extent.offset + extent.length)
        return TensorLocation(extent.file, extent.offset, dtype_named(extent.dtype), (extent.numel,))

    def _in_archive_of_its_own(self, extent: ArchivedTensor) -> TensorLocation:
        archive = TorchArchive(self._reader, extent.file, extent.offset, extent.length)
        tensor = archive.load()
        if isinstance(tensor, Float8Reference):
            return _of_its_shape(archive.scaled_payload(tensor), extent, archive)
        if not isinstance(tensor, TensorReference):
            raise _no_tensor(tensor, archive.where)
        payload = _of_its_shape(archive.payload(tensor), extent, archive)
        stencil = archive.stencil(tensor, payload)
        if stencil is not None and len(self._stencils) < _SIZES:
            alike = self._stencils.setdefault((extent.length, extent.dtype), [])
            if len(alike) < _STENCILS_OF_A_SIZE:
                alike.append(stencil)
        return payload

    def _by_stencil(self, extent: ArchivedTensor) -> TensorLocation | None:
        """The payload of an archive that is like one that has been looked into."""
        for stencil in self._stencils.get((extent.length, extent.dtype), ()):
            found = stencil.payload(self._reader, extent.file, extent.offset)
            if found is not None and found.shape == extent.shape:
                return found
        return None


def _of_its_shape(payload: TensorLocation, extent: ArchivedTensor, archive: TorchArchive) -> TensorLocation:
    """A tensor is read as it lies: a transposed one has as many elements, in another order."""
    if payload.shape != extent.shape or payload.gives != dtype_named(extent.dtype):
        raise _another_tensor(
            f"shape {payload.shape} of {payload.gives}", f"shape {extent.shape} of {extent.dtype}", archive
        )
    return payload


def _of_its_size(payload: TensorLocation, extent: ArchivedRecord, archive: TorchArchive) -> TensorLocation:
    if payload.numel != extent.numel or payload.gives != dtype_named(extent.dtype):
        raise _another_tensor(
            f"{payload.numel} elements of {payload.gives}", f"{extent.numel} elements of {extent.dtype}", archive
        )
    return payload


def _another_tensor(found: str, expected: str, archive: TorchArchive) -> UnreadableCheckpointError:
    return UnreadableCheckpointError(
        "a record of the checkpoint does not match its metadata",
        found=found,
        expected=expected,
        where=archive.where,
        hint="the metadata belongs to another checkpoint: restore the folder as it was written",
    )


def _no_tensor(found: object, where: str) -> CheckpointError:
    """What stands where a tensor should: a quantized one of a kind that is not read is nobody's damage."""
    if isinstance(found, Placeholder) and found.pickled_module.startswith("transformer_engine."):
        return UnsupportedCheckpointError(
            "weights of this checkpoint are stored as quantized tensors of a kind that this version does not read",
            found=f"{found.pickled_module}.{found.pickled_name}",
            expected="plain tensors, or fp8 tensors with one scale",
            where=where,
            hint="resume under the layout that it was written with, by stock Megatron; or save without "
            "--fp8-param-gather or --fp4-param-gather",
        )
    return UnreadableCheckpointError(
        "a record of the checkpoint holds no tensor", found=type(found).__name__, where=where
    )
