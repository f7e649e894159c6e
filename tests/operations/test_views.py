"""Test views of checkpoints: with other names, with other weights, without optimizer.

Each way of making a view lists here what it replaces. All other members must be the same; they are found by
introspection, so that new ones are covered.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext import TorchDist, convert, open_checkpoint
from mcore_ckpt_ext.families.vision import PREFIX
from mcore_ckpt_ext.formats.adapter_only import adapters_on_model, with_bridge_names
from mcore_ckpt_ext.formats.adapter_scaling import scaling_of
from mcore_ckpt_ext.formats.hugging_face.vision import as_text_model
from mcore_ckpt_ext.formats.merged import merged_view
from mcore_ckpt_ext.formats.parts import Files, Job, States, StoredOptimizer, StoredWeights, Weights
from mcore_ckpt_ext.formats.renamed import NameMap
from mcore_ckpt_ext.formats.under_layer_spec import under_layer_spec
from mcore_ckpt_ext.formats.view import CheckpointView, Composition, OpenedFormat
from mcore_ckpt_ext.formats.views import rename_tensors, with_first_moments, with_layer_form, without_optimizer
from mcore_ckpt_ext.formats.weights_view import WeightsView, with_file_names
from mcore_ckpt_ext.model_space.names import parse
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.optimizers.state_view import StateView
from mcore_ckpt_ext.planning.plan import DerivedSource, IndexedSource, Source, StoredSlice, named_tensor
from mcore_ckpt_ext.planning.source_view import SourceView
from tests.harness.checkpoints import CORRUPTED, FIXTURES, fixture_named, optimizer_alone
from tests.harness.peft import adapter, peft_folder

NAMES = {
    "model.weights",
    "model.sharded_keys",
    "optimizer.state",
    "optimizer.shows_registration",
    "job.observed_orders",
}
SPEC = NAMES | {"job.arguments", "job.unbuildable", "states.extra", "format.notices"}
REGISTRATION = {"optimizer.shows_registration"}  # no longer true under other names, however often they change
VISION = "vision_model.merger.linear_fc2.bias"
NO_OPTIMIZER = {"optimizer.format"}
FORM = {"model.sharded_keys", "job.arguments"}
MERGED = NO_OPTIMIZER | {
    "model.weights", "model.sharded_keys", "states.extra", "format.notices", "composition.merged_from",
    "composition.merge_notes", "files.unread", "files.reader", "files.transfer",
}  # fmt: skip
# Under other names: a permutation of these is not the same model, and not what a conversion writes.
NAMED = [name for name in FIXTURES if name not in CORRUPTED]
LLAMA_LIKE = ("p02", "p42", "p48")


def layers_reversed(checkpoint: CheckpointView) -> dict[str, str]:
    """Other names for all parameters of layers, one for one: those of the layers in reverse order."""
    parsed = [parse(name) for name in checkpoint.names(WEIGHT)]
    last = max((name.layer for name in parsed if name.layer is not None), default=0)
    return {
        old: old if name.layer is None else old.replace(f".layers.{name.layer}.", f".layers.{last - name.layer}.")
        for old, name in zip(checkpoint.names(WEIGHT), parsed, strict=True)
    }


def under_reversed_names(checkpoint: CheckpointView) -> CheckpointView:
    return rename_tensors(checkpoint, layers_reversed(checkpoint))


def leaves(part: Any, path: str = "") -> dict[str, Any]:
    """The fields of a view and of its parts, by their paths."""
    found: dict[str, Any] = {}
    for field in fields(part):
        value, own = getattr(part, field.name), f"{path}{field.name}"
        is_part = isinstance(value, (Composition, Files, Job, OpenedFormat, States, StoredOptimizer, StoredWeights))
        found |= leaves(value, f"{own}.") if is_part else {own: value}
    return found


def replaced_in(view: CheckpointView, source: CheckpointView) -> set[str]:
    """The paths of the fields that differ."""
    own, other = leaves(view), leaves(source)
    assert own.keys() == other.keys()
    return {path for path, value in own.items() if value is not other[path] and value != other[path]}


@pytest.mark.parametrize(
    ("way", "replaced"),
    [
        (lambda source: rename_tensors(source, {}), set()),
        (under_reversed_names, NAMES),
        (lambda source: under_layer_spec(source, "transformer_engine"), SPEC),
        (lambda source: under_layer_spec(source, "local"), SPEC),
        (without_optimizer, NO_OPTIMIZER),
        (lambda source: with_layer_form(source, {}), set()),
        (lambda source: with_layer_form(source, {"hetereogenous_dist_checkpoint": True}), FORM),
        (lambda source: adapters_on_model(source, source), {"composition.base_model"}),
        (with_first_moments, set()),
    ],
    ids=[
        *("as it is", "other names", "transformer engine", "local", "no optimizer", "layers as they are"),
        *("layers by themselves", "adapters", "steps were made"),
    ],
)
@pytest.mark.parametrize("name", NAMED)
def test_views_replace_only_their_parts(
    name: str, way: Callable[[CheckpointView], CheckpointView], replaced: set[str]
) -> None:
    source = open_checkpoint(fixture_named(name).run)
    view = way(source)
    assert replaced_in(view, source) <= replaced
    assert replaced_in(view, source) >= replaced - NAMES or name == "p22"


def test_names_of_other_models_replace_only_their_parts() -> None:
    """The same weights under the names of a vision-language model, and of ms-swift's adapters."""
    source = open_checkpoint(fixture_named("p02").run)
    first, *rest = source.names(WEIGHT)
    whole = rename_tensors(source, {first: VISION, **{name: f"{PREFIX}{name}" for name in rest}})
    assert (
        replaced_in(as_text_model(whole), whole)
        == (NAMES | {"job.arguments", "composition.whole_model"}) - REGISTRATION
    )
    swift = rename_tensors(source, {first: "decoder.layers.0.mlp.linear_fc1.lora_A.default.weight"})
    assert replaced_in(with_bridge_names(swift), swift) == (NAMES | {"composition.adapters_by_rank"}) - REGISTRATION


def test_every_view_is_here() -> None:
    """A function that replaces parts of a view and is not tested in this file could replace others as well."""
    found = set()
    for path in Path(mcore_ckpt_ext.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.returns is not None and node.args.args:
                kinds = {ast.unparse(one) for one in (node.returns, node.args.args[0].annotation) if one is not None}
                calls = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
                found |= {node.name} if kinds == {"CheckpointView"} and "replace" in calls else set()
    assert {"rename_tensors", "merged_view", "under_layer_spec"} <= found <= globals().keys()


def members(kind: type) -> list[str]:
    """The public members of a class, those that its bases have included."""
    return sorted(name for name in {*dir(kind), *inspect.get_annotations(kind)} if not name.startswith("_"))


def answers(source: Any, kinds: Sequence[str], regions: Mapping[str, Region], of: type) -> dict[tuple[str, ...], Any]:
    """Everything that a source answers, by member and by what it was asked for."""
    found: dict[tuple[str, ...], Any] = {}
    for member in members(of):
        value = getattr(source, member)
        if not callable(value):
            found[member,] = value
            continue
        parameters = list(inspect.signature(value).parameters)
        known: dict[str, Mapping[str, Any]] = {
            "kind": dict(zip(kinds, kinds, strict=True)), "name": {name: name for name in regions}, "region": regions,
        }  # fmt: skip
        asked: list[tuple[tuple[str, ...], tuple[Any, ...]]] = [((), ())]
        for parameter in parameters:
            asked = [
                ((*keys, key), (*given, one)) for keys, given in asked for key, one in known[parameter].items()
            ]  # an unknown parameter fails here: say what it means
        for keys, given in asked:
            question = (member, *keys)
            found[question] = value(*given)
    return found


def under(names: NameMap, value: Any) -> Any:
    """An answer with every name in it replaced; what holds no names is itself."""
    if isinstance(value, str):
        return names.of(value)
    if isinstance(value, Mapping):
        return {under(names, key): under(names, one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(under(names, one) for one in value)
    if is_dataclass(value) and not isinstance(value, type) and "name" in {field.name for field in fields(value)}:
        return replace(value, name=names.of(value.name))  # type: ignore[attr-defined]
    if isinstance(value, StoredSlice):
        return value._replace(slice=under(names, value.slice))
    if isinstance(value, Slice):
        return replace(value, regions=under(names, value.regions))
    return value


def comparable(value: Any) -> Any:
    """An answer that can be compared: of what only computes, whether it is there."""
    if isinstance(value, (list, tuple)):
        return [comparable(one) for one in value]
    return "derived" if hasattr(value, "inputs") else value


@pytest.mark.parametrize("name", NAMED)
def test_names_are_all_that_changes(name: str) -> None:
    source = open_checkpoint(fixture_named(name).run)
    names = NameMap(layers_reversed(source))
    view = under_reversed_names(source)
    sources: list[tuple[Any, Any, type, Sequence[str]]] = [
        (source.model.weights(), view.model.weights(), Weights, (WEIGHT,))
    ]
    if source.optimizer.format():
        state = source.optimizer.state()
        sources.append((state, view.optimizer.state(), OptimizerState, state.kinds))
    for own, other, of, kinds in sources:
        chosen = [one for one in own.names() if own.logical_tensor(kinds[0], one) is not None][::3]
        regions = {one: Region.whole(one, own.logical_tensor(kinds[0], one).shape) for one in chosen}
        asked = {names.of(one): replace(region, name=names.of(one)) for one, region in regions.items()}
        before, after = answers(own, kinds, regions, of), answers(other, kinds, asked, of)
        assert len(before) == len(after) > len(chosen)
        for key, answer in before.items():
            given = after[tuple(names.of(part) for part in key)]
            assert comparable(given) == comparable(under(names, answer)), key


@pytest.mark.parametrize(
    ("view", "protocols"),
    [
        (SourceView, (Source, DerivedSource, IndexedSource)),
        (WeightsView, (Weights, DerivedSource, IndexedSource)),
        (StateView, (OptimizerState, DerivedSource)),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else "",
)
def test_a_view_has_every_member(view: type, protocols: Sequence[type]) -> None:
    """What is no field of a view would be that of its base, whatever it is made from."""
    assert {field.name for field in fields(view)} == {name for one in protocols for name in members(one)}


@pytest.mark.parametrize("name", ["p02", "p08", "p41"])
def test_weights_in_another_folder_are_the_same(name: str) -> None:
    weights = open_checkpoint(fixture_named(name).run).model.weights()
    other = with_file_names(weights, lambda file: f"/there/{file}")
    again = with_file_names(other, lambda file: file.removeprefix("/there/"))
    regions = {one: Region.whole(one, weights.logical_tensor(WEIGHT, one).shape) for one in weights.names()}  # type: ignore[union-attr]
    assert answers(again, [WEIGHT], regions, Weights) == answers(weights, [WEIGHT], regions, Weights)
    for one in weights.names():
        parts = [slice_ for part in other.copies(WEIGHT, one) for copy in part for slice_ in copy]
        assert all(part.extent.file.startswith("/there/") for part in [*parts, *other.stored_slices(WEIGHT, one)])


@pytest.mark.parametrize("name", ["p01", "p02", "p04"])
def test_an_optimizer_with_external_weights_is_that_of_the_whole_checkpoint(name: str, tmp_path: Path) -> None:
    """The weights, their sharded keys and extra states are those of the other folder, the optimizer is its own."""
    whole = open_checkpoint(fixture_named(name).run)
    view = open_checkpoint(optimizer_alone(name, tmp_path / "alone"), weights=fixture_named(name).run)
    kinds = whole.optimizer.kinds()
    shapes = {one: named_tensor(whole, WEIGHT, one).shape for one in whole.names(WEIGHT)}
    asked = {one: Region.whole(one, shape) for one, shape in shapes.items()}
    own, other = (answers(one.optimizer.state(), kinds, asked, OptimizerState) for one in (view, whole))
    for key in own.keys() - {("buffers",), ("order_sources",)}:  # objects; the order is found out
        assert comparable(own[key]) == comparable(other[key]), key
    assert len(view.optimizer.state().buffers) == len(whole.optimizer.state().buffers)
    back = with_file_names(view.model.weights(), lambda file: Path(file).name)
    assert answers(back, [WEIGHT], asked, Weights) == answers(whole.model.weights(), [WEIGHT], asked, Weights)
    assert (view.model.sharded_keys(), view.states.extra()) == (whole.model.sharded_keys(), whole.states.extra())
    assert view.job.is_release == whole.job.is_release


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_a_merged_model_is_the_base_but_for_its_weights(name: str, tmp_path: Path) -> None:
    base = open_checkpoint(fixture_named(name).run)
    width = base.job.arguments().whole("hidden_size")
    folder = peft_folder(tmp_path / "peft", adapter("model.layers.0.self_attn.o_proj", width, width))
    adapters = open_checkpoint(folder, weights=fixture_named(name).run)
    view = merged_view(base, adapters, scaling_of(adapters, None), None, {})
    assert replaced_in(view, base) == MERGED
    asked = {one: Region.whole(one, named_tensor(base, WEIGHT, one).shape) for one in base.names(WEIGHT)}
    assert answers(view.model.weights(), [WEIGHT], asked, Weights) == answers(
        base.model.weights(), [WEIGHT], asked, Weights
    )
    derived = [one for one in base.names(WEIGHT) if view.derivation(WEIGHT, one) is not None]
    assert derived == ["decoder.layers.0.self_attention.linear_proj.weight"]
    assert (view.model.sharded_keys(), view.states.extra()) == (base.model.sharded_keys(), base.states.extra())


@pytest.mark.parametrize("spec", ["transformer_engine", "local"])
def test_weights_made_of_masters_prove_nothing_under_either_layer_spec(spec: str, tmp_path: Path) -> None:
    run = fixture_named("p50").run
    report = convert(run, tmp_path / "out", TorchDist(transformer_impl=spec))
    assert report.proven_elements == convert(run, tmp_path / "as it is", TorchDist()).proven_elements == 0
