"""A manifest: the SHA-256 of each file and tensor of a folder, as text that `sha256sum -c` reads.

GNU `sha256sum` can compare the files without this package, because lines of tensors begin with `#` and are comments:

    # mcore_ckpt_ext manifest 1
    3b1c...  common.pt
    # tensor {"kind": "weight", "name": "...", "dtype": "bfloat16", "shape": [128, 32], "sha256": "..."}
    # end: 9 files, 120 tensors
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from mcore_ckpt_ext.errors import UnreadableCheckpointError, quantity, shorten
from mcore_ckpt_ext.storage.json_text import parse_json

_HEAD = "# mcore_ckpt_ext manifest 1"
_TENSOR = "# tensor "
_END = "# end: "
_FILE = re.compile(r"^(\\?)([0-9a-f]{64}) [ *](.+)$", re.ASCII)
_DIGEST = re.compile(r"^[0-9a-f]{64}$", re.ASCII)
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_ESCAPED = re.compile(r"\\(.)")
_LIMIT = 1 << 30
_LONGEST_PATH = 4096  # Linux (PATH_MAX)
_EXPECTED = "pass a file that `mcore-ckpt verify PATH --record FILE` or `sha256sum` wrote"


class TensorDigest(NamedTuple):
    """The SHA-256 of a tensor's elements in row-major order, little-endian; shape in elements."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The SHA-256 of each file, by relative path, and of each tensor.

    `has_tensors` is False for a manifest of another program, which lists only files.
    """

    files: dict[str, str] = field(default_factory=dict)
    tensors: tuple[TensorDigest, ...] = ()
    has_tensors: bool = True


def manifest_text(manifest: Manifest) -> str:
    """Return the text of a manifest."""
    files = [_file_line(name, digest) for name, digest in sorted(manifest.files.items())]
    tensors = [f"{_TENSOR}{json.dumps(tensor._asdict())}" for tensor in manifest.tensors]
    return "\n".join([_HEAD, *files, *tensors, _end(len(files), len(tensors)), ""])


def read_manifest(path: Path) -> Manifest:
    """Read a manifest, or a list of files that `sha256sum` printed.

    Raises:
        UnreadableCheckpointError: the file cannot be read, is incomplete, or is not a manifest.
    """
    try:
        if path.stat().st_size > _LIMIT:
            raise ValueError(f"more than {_LIMIT:,} bytes")
        # Linux file names are bytes, which need not be UTF-8.
        return _parse(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError as error:
        raise UnreadableCheckpointError(
            "the manifest cannot be read", found=error.strerror, where=str(path), hint=_EXPECTED
        ) from error
    except ValueError as error:
        raise UnreadableCheckpointError(
            "this file is not a manifest, or is damaged",
            found=shorten(str(error)),
            where=str(path),
            hint=_EXPECTED,
        ) from error


def is_manifest(path: Path) -> bool:
    """Return whether a file begins like a manifest of this package."""
    with path.open("rb") as stream:
        return stream.read(len(_HEAD)) == _HEAD.encode()


def _parse(text: str) -> Manifest:
    lines = text.removesuffix("\n").split("\n")
    is_ours = lines[0] == _HEAD
    tensors = [_tensor(line) for line in lines if is_ours and line.startswith(_TENSOR)]
    listed = [_file(line) for line in lines if line and not line.startswith("#")]
    files = dict(listed)
    if other := [name for name, digest in listed if files[name] != digest]:
        raise ValueError(f"it lists {other[0]!r} twice, with different digests")
    if is_ours and lines[-1] != _end(len(files), len(tensors)):
        counts = f"{quantity(len(files), 'file')} and {quantity(len(tensors), 'tensor')}"
        raise ValueError(f"it has {counts}, and ends with {lines[-1]!r}")
    if not files:
        raise ValueError("it lists no file")
    return Manifest(files, tuple(tensors), is_ours)


def _end(files: int, tensors: int) -> str:
    return f"{_END}{files} files, {tensors} tensors"


def _file_line(name: str, digest: str) -> str:
    escaped = "".join(_ESCAPES.get(letter, letter) for letter in name)
    begin = "" if escaped == name else "\\"
    return f"{begin}{digest}  {escaped}"


def _file(line: str) -> tuple[str, str]:
    match = _FILE.match(line)
    if match is None:
        raise ValueError(f"a line that names no file: {line!r}")
    escaped, digest, name = match.groups()
    if escaped:
        name = _ESCAPED.sub(lambda escape: {"n": "\n", "r": "\r"}.get(escape[1], escape[1]), name)
    if len(name) > _LONGEST_PATH:
        raise ValueError(f"the path of a file has {len(name):,} characters")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it names a file outside of the folder: {name!r}")
    return str(path), digest


def _tensor(line: str) -> TensorDigest:
    entry = parse_json(line.removeprefix(_TENSOR).encode())
    texts = ("kind", "name", "dtype", "sha256")
    if not isinstance(entry, dict) or entry.keys() != {*texts, "shape"}:
        raise ValueError(f"a line that describes no tensor: {line!r}")
    shape = entry["shape"]
    if not all(isinstance(entry[key], str) for key in texts) or not _is_shape(shape):
        raise ValueError(f"a tensor with invalid values: {line!r}")
    if not _DIGEST.match(entry["sha256"]):
        raise ValueError(f"a tensor without its SHA-256: {line!r}")
    return TensorDigest(entry["kind"], entry["name"], entry["dtype"], tuple(shape), entry["sha256"])


def _is_shape(shape: object) -> bool:
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)


def differing_tensors(
    recorded: Iterable[TensorDigest], found: Iterable[TensorDigest]
) -> list[tuple[TensorDigest, str]]:
    """Return the tensors that differ between a manifest and a checkpoint, each with its difference."""
    have = {(tensor.kind, tensor.name): tensor for tensor in found}
    differences: list[tuple[TensorDigest, str]] = []
    for record in recorded:
        other = have.pop((record.kind, record.name), None)
        if other is None:
            differences.append((record, "missing: it is recorded, but not in the checkpoint"))
        elif (other.dtype, other.shape) != (record.dtype, record.shape):
            difference = f"it is {other.dtype} {other.shape}, recorded is {record.dtype} {record.shape}"
            differences.append((record, difference))
        elif other.sha256 != record.sha256:
            differences.append((record, f"its SHA-256 is {other.sha256[:16]}..., recorded is {record.sha256[:16]}..."))
    return [*differences, *((tensor, "it is not recorded") for tensor in have.values())]
