"""Test what a program asks of an open checkpoint, and what it hears of its mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.master_check import master_check_of
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import MATRIX


@pytest.fixture(scope="module")
def checkpoint() -> CheckpointView:
    return mcore_ckpt_ext.open_checkpoint(fixture_named("p01").run)


def test_a_region_is_read_by_slices_and_by_offsets(checkpoint: CheckpointView) -> None:
    for kind in ("weight", "exp_avg"):
        tensor = checkpoint.tensor(kind, MATRIX)
        whole = tensor.read()
        assert tensor.read((slice(2, 4), slice(None, 8))).equal(whole[2:4, :8])
        assert tensor.read(slice(-3, None)).equal(whole[-3:])
        assert tensor.read((slice(5, 3),)).shape == (0, *whole.shape[1:])
        assert tensor.read(mcore_ckpt_ext.Region(MATRIX, (1, 2), (3, 4))).equal(whole[1:4, 2:6])


@pytest.mark.parametrize(
    "region",
    [
        (slice(0, 4, 2),),
        (0, 1),
        slice(0.5, 2.0),
        "all",
        (slice(None),) * 3,
        mcore_ckpt_ext.Region(MATRIX, (0,), (1,)),
        mcore_ckpt_ext.Region(MATRIX, (0, 0), (1, 1 << 40)),
        mcore_ckpt_ext.Region(MATRIX, (-1, 0), (1, 1)),
        mcore_ckpt_ext.Region("another", (0, 0), (1, 1)),
    ],
)
def test_what_is_no_region_is_a_mistake_and_no_damage(checkpoint: CheckpointView, region: object) -> None:
    with pytest.raises(mcore_ckpt_ext.UsageError, match="not a region of the tensor.*expected: slices with step 1"):
        checkpoint.tensor("weight", MATRIX).read(region)  # type: ignore[arg-type]


def test_an_unknown_tensor_names_similar_ones(checkpoint: CheckpointView) -> None:
    with pytest.raises(mcore_ckpt_ext.UnknownNameError, match=f"no such tensor; .*expected: .*{MATRIX}") as caught:
        checkpoint.tensor("weight", MATRIX.replace("fc1", "fc7"))
    assert isinstance(caught.value, KeyError)
    assert not str(caught.value).startswith(("'", '"'))


def test_a_name_that_is_no_text_is_a_mistake(checkpoint: CheckpointView) -> None:
    with pytest.raises(TypeError, match="takes a kind and a name, both str; not 'weight', 5"):
        checkpoint.tensor("weight", 5)  # type: ignore[arg-type]


def test_an_unknown_kind_is_a_mistake(checkpoint: CheckpointView) -> None:
    with pytest.raises(mcore_ckpt_ext.UnknownNameError, match="no such kind.*found: exp; expected: weight or "):
        checkpoint.names("exp")
    with pytest.raises(mcore_ckpt_ext.UnknownNameError, match="no such kind"):
        checkpoint.tensor("exp", MATRIX)
    assert checkpoint.names("param_remainder") == []


def test_a_checkpoint_is_printed_in_a_line(checkpoint: CheckpointView) -> None:
    assert (
        repr(checkpoint)
        == f"<Checkpoint torch_dist, iteration {checkpoint.job.iteration()}, {checkpoint.files.folder}>"
    )
    assert len(repr(checkpoint.tensor("weight", MATRIX))) < 200


def test_a_checkpoint_is_made_of_parts() -> None:
    """What one part answers is a member of that part, not of the view as well."""
    own = {name for name in (*vars(CheckpointView), *CheckpointView.__annotations__) if not name.startswith("__")}
    parts = {field.name for field in fields(CheckpointView)}
    assert parts == {"format", "files", "model", "optimizer", "job", "states", "composition"}
    assert len(own) <= 15


@pytest.mark.parametrize("replaced", ["arguments", "format"])
def test_values_derived_of_a_part_are_not_those_of_the_replaced_one(replaced: str, checkpoint: CheckpointView) -> None:
    before = (checkpoint.job.layout, checkpoint.job.master_check, checkpoint.optimizer.kinds())
    arguments = checkpoint.job.arguments().replace(tensor_model_parallel_size=2, use_precision_aware_optimizer=True)
    if replaced == "arguments":
        view = replace(checkpoint, job=replace(checkpoint.job, arguments=lambda: arguments))
        assert view.job.layout == ParallelLayout.from_arguments(arguments) != before[0]
        assert view.job.master_check is master_check_of(arguments) is not before[1]
    else:
        view = replace(checkpoint, optimizer=replace(checkpoint.optimizer, format=lambda: None))
        assert (view.optimizer.kinds(), view.optimizer.carried_kinds(), view.kinds()) == ((), (), ("weight",))
    assert (checkpoint.job.layout, checkpoint.job.master_check, checkpoint.optimizer.kinds()) == before


def test_results_are_printed_on_a_screen(tmp_path: Path) -> None:
    run = fixture_named("p01").run
    results = [
        mcore_ckpt_ext.inspect(run),
        mcore_ckpt_ext.verify(run),
        mcore_ckpt_ext.compare(run, run),
        mcore_ckpt_ext.plan(run, 8),
        mcore_ckpt_ext.convert(run, tmp_path / "out", "torch_dist", dry_run=True),
        mcore_ckpt_ext.choose_layout(run, 4),
    ]
    for result in results:
        assert repr(result).startswith(f"{type(result).__name__}(")
        assert len(repr(result)) < 2500, repr(result)


def test_a_conversion_accepts_the_name_of_a_format(tmp_path: Path) -> None:
    report = mcore_ckpt_ext.convert(fixture_named("p01").run, tmp_path / "out", "torch_dist", dry_run=True)
    assert report.files


@pytest.mark.parametrize(
    ("target", "error", "says"),
    [
        ("torchdist", mcore_ckpt_ext.UsageError, "no format has this name.*found: torchdist; expected: .*torch_dist"),
        (mcore_ckpt_ext.TorchDist, TypeError, r"TorchDist\(\) .*or a name: .*torch_dist.*; not TorchDist"),
        (None, TypeError, "not NoneType"),
    ],
)
def test_what_is_no_format_is_a_mistake(target: object, error: type[Exception], says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says):
        mcore_ckpt_ext.convert(fixture_named("p01").run, tmp_path / "out", target)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda: mcore_ckpt_ext.open_checkpoint(None),  # type: ignore[arg-type]
        lambda: mcore_ckpt_ext.inspect(5),  # type: ignore[arg-type]
        lambda: mcore_ckpt_ext.verify(None),  # type: ignore[arg-type]
        lambda: mcore_ckpt_ext.compare(fixture_named("p01").run, 3),  # type: ignore[arg-type]
        lambda: mcore_ckpt_ext.convert(None, "out", "canonical"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_path_is_a_mistake_and_not_damage(call: Callable[[], object]) -> None:
    with pytest.raises(mcore_ckpt_ext.UsageError, match="not a path; found: .*; expected: a string or a path object"):
        call()


def test_a_kind_to_drop_may_be_a_string(tmp_path: Path) -> None:
    report = mcore_ckpt_ext.convert(
        fixture_named("p01").run, tmp_path / "out", "canonical", drop="optimizer", dry_run=True
    )
    assert "exp_avg" in {item.kind for item in report.account.not_looked_at}


def test_a_number_of_gpus_is_a_number() -> None:
    with pytest.raises(mcore_ckpt_ext.UsageError, match="so many GPUs; found: '4'"):
        mcore_ckpt_ext.plan(fixture_named("p01").run, "4")  # type: ignore[arg-type]
