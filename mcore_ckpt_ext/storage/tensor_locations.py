"""Locates the elements of stored arrays, with templates for archives of equal dtype and shape."""

from __future__ import annotations

import threading
from collections import OrderedDict

from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.planning.array_location import (
    ArchivedRecord,
    ArchivedTensor,
    Extent,
    PlainExtent,
    QuantizedMatrix,
    RawArray,
    ReorderedMatrix,
)
from mcore_ckpt_ext.storage.checksums import Checksums
from mcore_ckpt_ext.storage.dtypes import dtype_named
from mcore_ckpt_ext.storage.files import FolderReader, cut_short
from mcore_ckpt_ext.storage.pickle_stubs import Placeholder
from mcore_ckpt_ext.storage.read_ahead import FileRange
from mcore_ckpt_ext.storage.tensor_location import ArchiveTemplate, TensorLocation
from mcore_ckpt_ext.storage.tensor_reference import Float8Reference, StorageReference, TensorReference
from mcore_ckpt_ext.storage.torch_archive import END_BYTES, TorchArchive

_OPEN_ARCHIVES = 32
# Archives of one size have few shapes, and a model has few sizes.
_TEMPLATES_OF_A_SIZE = 4
_SIZES = 1024


class TensorLocations:
    """The locations of the tensors in one checkpoint folder; safe to use from several threads.

    Args:
        reader: reads the files of the folder.
        checksums: records all arrays that are located, to compare their checksums. A writer must compare them: the
            checksums of its output would hide damage, and a transient read error shows nowhere else.
    """

    def __init__(self, reader: FolderReader, checksums: Checksums | None = None) -> None:
        self._reader = reader
        self._checksums = checksums
        self._locations: dict[tuple[str, int, str], TensorLocation] = {}
        self._archives: OrderedDict[tuple[str, int], TorchArchive] = OrderedDict()
        self._templates: dict[tuple[int, str], list[ArchiveTemplate]] = {}
        self._lock = threading.Lock()

    def locate(self, extent: PlainExtent) -> TensorLocation:
        """Return the location of the elements of a stored array.

        Raises:
            UnreadableCheckpointError: the stored array is not the one that the metadata describes.
        """
        key = _key_of(extent)
        with self._lock:
            location = self._locations.get(key)
        if location is None:
            location = self._look_up(extent)
            with self._lock:
                is_new = key not in self._locations
                self._locations[key] = location
            if is_new and self._checksums is not None:
                self._add_checksums(extent, location, self._checksums)
        return location

    def ends(self, extent: Extent) -> list[FileRange]:
        """Return the ranges that `locate` reads first: both ends of an archive, unless it is located."""
        while isinstance(extent, (ReorderedMatrix, QuantizedMatrix)):
            extent = extent.stored
        with self._lock:
            if isinstance(extent, RawArray) or _key_of(extent) in self._locations:
                return []
        count = min(END_BYTES, extent.length)
        return [(extent.file, start, count) for start in (extent.offset, extent.offset + extent.length - count)]

    def _add_checksums(self, extent: PlainExtent, location: TensorLocation, checksums: Checksums) -> None:
        """Register the records of an array, so that their checksums are compared."""
        if isinstance(extent, RawArray):
            checksums.add_array(location, extent)
        elif isinstance(extent, ArchivedRecord):
            archive = self.archive(extent.file, extent.offset, extent.length)
            checksums.add_records(location, archive, [f"data/{extent.record}"])
        else:
            archive = TorchArchive(self._reader, extent.file, extent.offset, extent.length)
            checksums.add_records(location, archive, archive.names)

    def archive(self, file: str, offset: int = 0, length: int | None = None) -> TorchArchive:
        """Return an archive of many objects.

        The directories of the last archives are cached, because each may list thousands of records.

        Raises:
            UnreadableCheckpointError: there is no complete archive at `offset`.
        """
        key = (file, offset)
        with self._lock:
            archive = self._archives.pop(key, None)
        if archive is None:
            archive = TorchArchive(self._reader, file, offset, length)
        with self._lock:
            self._archives[key] = archive
            while len(self._archives) > _OPEN_ARCHIVES:
                self._archives.popitem(last=False)
        return archive

    def _look_up(self, extent: PlainExtent) -> TensorLocation:
        if isinstance(extent, RawArray):
            return self._raw(extent)
        if isinstance(extent, ArchivedTensor):
            return self._locate_by_template(extent) or self._locate_in_archive(extent)
        archive = self.archive(extent.file, extent.offset, extent.length)
        storage = StorageReference(dtype_named(extent.dtype), extent.record, extent.numel)
        tensor = TensorReference(storage, 0, (extent.numel,), (1,))
        return archive.locate(tensor)

    def _raw(self, extent: RawArray) -> TensorLocation:
        size = self._reader.size(extent.file)
        if size < extent.offset + extent.length:
            raise cut_short(self._reader.folder / extent.file, size, extent.offset + extent.length)
        return TensorLocation(extent.file, extent.offset, dtype_named(extent.dtype), (extent.numel,))

    def _locate_in_archive(self, extent: ArchivedTensor) -> TensorLocation:
        archive = TorchArchive(self._reader, extent.file, extent.offset, extent.length)
        tensor = archive.load()
        if isinstance(tensor, Float8Reference):
            return _check_shape(archive.locate_scaled(tensor), extent, archive)
        if not isinstance(tensor, TensorReference):
            raise _not_a_tensor(tensor, archive.where)
        location = _check_shape(archive.locate(tensor), extent, archive)
        template = archive.template(tensor, location)
        if template is not None and len(self._templates) < _SIZES:
            alike = self._templates.setdefault((extent.length, extent.dtype), [])
            if len(alike) < _TEMPLATES_OF_A_SIZE:
                alike.append(template)
        return location

    def _locate_by_template(self, extent: ArchivedTensor) -> TensorLocation | None:
        """Return the location of a tensor whose archive matches a known template; None if none matches."""
        for template in self._templates.get((extent.length, extent.dtype), ()):
            location = template.locate(self._reader, extent.file, extent.offset)
            if location is not None and location.shape == extent.shape:
                return location
        return None


def _key_of(extent: PlainExtent) -> tuple[str, int, str]:
    return extent.file, extent.offset, extent.record if isinstance(extent, ArchivedRecord) else ""


def _check_shape(location: TensorLocation, extent: ArchivedTensor, archive: TorchArchive) -> TensorLocation:
    """Check the shape of a tensor: a transposed one has as many elements, in another order."""
    if location.shape != extent.shape or location.decoded_dtype != dtype_named(extent.dtype):
        raise UnreadableCheckpointError(
            "a record of the checkpoint does not match its metadata",
            found=f"shape {location.shape} of {location.decoded_dtype}",
            expected=f"shape {extent.shape} of {extent.dtype}",
            where=archive.where,
            hint="the metadata belongs to another checkpoint: restore the folder as it was written",
        )
    return location


def _not_a_tensor(content: object, where: str) -> CheckpointError:
    """Return the error for an object in place of a tensor; an unsupported quantized tensor is not damage."""
    if isinstance(content, Placeholder) and content.pickled_module.startswith("transformer_engine."):
        return UnsupportedCheckpointError(
            "weights of this checkpoint are stored as quantized tensors of a kind that this version does not read",
            found=f"{content.pickled_module}.{content.pickled_name}",
            expected="plain tensors, or fp8 tensors with one scale",
            where=where,
            hint="resume under the layout that it was written with, by stock Megatron; or save without "
            "--fp8-param-gather or --fp4-param-gather",
        )
    return UnreadableCheckpointError(
        "a record of the checkpoint holds no tensor", found=type(content).__name__, where=where
    )
