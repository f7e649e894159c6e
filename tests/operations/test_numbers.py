"""Test that numbers in foreign descriptions are integers, or all readers refuse the description."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.storage.budget import whole_number
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE
from mcore_ckpt_ext.storage.safe_pickle import safe_loads
from tests.harness.checkpoints import Fixture, fixture_named

NO_INTEGERS: list[object] = [0.0, True, "0", None, -1, 1 << 80]


@pytest.mark.parametrize("value", NO_INTEGERS)
def test_invalid_whole_numbers_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="an offset that is"):
        whole_number(value, "an offset")


def with_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("kind", [float, str])
@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_offsets_of_safetensors(command: str, kind: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    target = mcore_ckpt_ext.Canonical() if command == "verify" else mcore_ckpt_ext.HuggingFace()
    mcore_ckpt_ext.convert(fixture_named("p02").run, folder, target)
    (folder / "mcore_ckpt_ext_digests.json").unlink()
    (file,) = folder.glob("*.safetensors")

    def change(header: dict[str, Any]) -> None:
        entry = next(entry for name, entry in header.items() if name != "__metadata__")
        entry["data_offsets"] = [kind(place) for place in entry["data_offsets"]]

    with_header(file, change)
    more = [str(tmp_path / "out"), "--to", "canonical"] if command == "convert" else []
    code = main([command, str(folder), *more])
    out = "".join(capsys.readouterr())
    assert code == (1 if command == "verify" else 2)
    assert "a safetensors file is damaged" in out
    assert "this is a bug" not in out


def changed_index(fixture: Fixture, change: Callable[[Any], None]) -> Path:
    """A checkpoint whose index was changed by torch's own classes."""
    path = fixture.iteration / METADATA_FILE
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, 4))
    return fixture.run


def first_place(metadata: Any, tensor: bool) -> Any:
    return next(
        place for index, place in metadata.storage_data.items() if (getattr(index, "offset", None) is None) != tensor
    )


def of_a_chunk(name: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        place = first_place(metadata, tensor=True)
        setattr(place, name, float(getattr(place, name)))

    return change


def of_an_object(name: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        place = first_place(metadata, tensor=False)
        setattr(place, name, float(getattr(place, name)))

    return change


def of_a_shape(metadata: Any) -> None:
    entry = next(entry for entry in metadata.state_dict_metadata.values() if hasattr(entry, "chunks"))
    entry.size = tuple(map(float, entry.size))


@pytest.mark.parametrize(
    "change",
    [of_a_chunk("offset"), of_a_chunk("length"), of_an_object("offset"), of_an_object("length"), of_a_shape],
    ids=["offset", "length", "offset of an object", "length of an object", "shape"],
)
def test_an_index_of_torch(change: Callable[[Any], None], tmp_path: Path) -> None:
    run = changed_index(fixture_named("p02").copy_to(tmp_path / "copy"), change)
    with pytest.raises(UnreadableCheckpointError, match="index is damaged"):
        mcore_ckpt_ext.open_checkpoint(run)


def test_a_description_of_zarr(tmp_path: Path) -> None:
    fixture = fixture_named("p31").copy_to(tmp_path / "copy")
    path = sorted(fixture.iteration.glob("*/.zarray"))[0]
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "shape": [float(size) for size in described["shape"]]}))
    with pytest.raises(CheckpointError, match="description of an array is damaged"):
        mcore_ckpt_ext.open_checkpoint(fixture.run)


def test_sizes_of_a_pickled_tensor() -> None:
    class Tensor:
        def __reduce__(self) -> tuple[Any, ...]:
            from torch._utils import _rebuild_tensor_v2

            return _rebuild_tensor_v2, (SimpleNamespace(), 0.0, (2,), (1,), False, {})

    with pytest.raises(CheckpointError):
        safe_loads(pickle.dumps(Tensor(), 2), "here")


def test_a_sidecar() -> None:
    about = {"version": 1, "written_by": "", "megatron": "", "iteration": 4.0, "layout": {}, "groups": []}
    with pytest.raises(ValueError, match="iteration that is 4"):
        Sidecar.from_json(json.dumps(about))
