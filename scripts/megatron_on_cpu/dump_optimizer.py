"""Dumps the live parameters and optimizer of every rank, and assembles dumps into whole tensors.

The tests compare checkpoints with these dumps: they are made from the tensors of the training, never from a checkpoint.

Writing (in the ranks): set ``MEGATRON_ON_CPU_DUMP`` to a folder, and ``MEGATRON_ON_CPU_DUMP_AT`` to ``load``, ``save``
or ``load,save`` (the default).  ``after_load`` is written when the model and the optimizer are set up, which includes
loading a checkpoint, and before the first step; ``after_save_0000004`` right after the checkpoint of iteration 4 was
saved or scheduled.  Each rank writes a file of its own.

Reading (anywhere): ``assemble(folder / "after_load")`` returns ``weight.<name>``, ``fp32_param.<name>`` and whatever
else the optimizer keeps (``exp_avg.<name>``, ``exp_avg_sq.<name>``, ``momentum_buffer.<name>``), with tensor-parallel
parts merged, a gated ``linear_fc1`` as all gates and then all up projections, layers and experts counted over the whole
model, and the names that checkpoints use.  ``training_state`` returns what belongs to the run,
``parameter_settings`` what the optimizer applies to each parameter.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_on_cpu.optimizer_parts import MOMENTS, optimizer_part, optimizers_of

FOLDER_VARIABLE = "MEGATRON_ON_CPU_DUMP"
"""Environment variable with the folder for dumps."""
MOMENTS_VARIABLE = "MEGATRON_ON_CPU_DUMP_AT"
"""Environment variable with the moments to dump at."""

_STATE_NAMES = ("fp32_param", *MOMENTS)
# Also layers of multi-token prediction, which have other names in checkpoints.
_LAYER = re.compile(r"(?:\w+\.)*?(?:decoder|encoder)\.layers\.\d+|mtp\.layers\.\d+\.(?:mtp_model|transformer)_layer")
_LOCAL_EXPERT = re.compile(r"(?P<before>.*\.experts\.)local_experts\.(?P<number>\d+)\.(?P<rest>.*)")
# Transformer Engine's grouped linear layers number the parameters of their experts.
_GROUPED_EXPERT = re.compile(r"(?P<before>.*\.experts\.)(?P<rest>linear_fc\d\.(?:weight|bias))(?P<number>\d+)")


@dataclass(frozen=True)
class Piece:
    """One rank's part of one parameter.

    Attributes:
        name: name in the whole model.
        copy: which copy of the parameter: pipeline rank, model chunk and, for experts, expert-parallel rank.
        tensor_rank: rank among the tensor-parallel ranks.
        partition_dim: dimension that tensor parallelism cuts, or None.
        sections: rows of the parts that are merged one by one (a gate and an up projection); empty without parts.
        weight: the live parameter, as long as this rank has it.
        start: where this rank's part of the optimizer's state starts in the flattened parameter.
        state: flat parts of the main parameter and its moments; empty where this rank has none.
        settings: the options of the parameter's group in the optimizer.
    """

    name: str
    copy: tuple[int, ...]
    tensor_rank: int
    partition_dim: int | None
    sections: tuple[int, ...]
    weight: torch.Tensor
    start: int = 0
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def install() -> None:
    """Wrap setup and saving if the environment names a folder; folder and moments are looked up at each call."""
    if FOLDER_VARIABLE not in os.environ:
        return
    training: Any = importlib.import_module("megatron.training.training")
    training.setup_model_and_optimizer = _dumping_after_load(training.setup_model_and_optimizer)
    training.save_checkpoint = _dumping_after_save(training.save_checkpoint)


def _folder_at(moment: str) -> Path | None:
    """Return the folder for dumps at a moment; None if no dump is requested."""
    wanted = moment in os.environ.get(MOMENTS_VARIABLE, "load,save").split(",")
    return Path(os.environ[FOLDER_VARIABLE]) if wanted else None


def _dumping_after_load(original: Any) -> Any:
    @functools.wraps(original)
    def setup(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        iteration = importlib.import_module("megatron.training").get_args().iteration
        if folder := _folder_at("load"):
            dump(folder / "after_load", iteration, model, optimizer, scheduler)
        return model, optimizer, scheduler

    return setup


def _dumping_after_save(original: Any) -> Any:
    @functools.wraps(original)
    def save(iteration: int, model: Any, optimizer: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(iteration, model, optimizer, scheduler, *args, **kwargs)
        if folder := _folder_at("save"):
            dump(folder / f"after_save_{iteration:07d}", iteration, model, optimizer, scheduler)
        return result

    return save


def dump(folder: Path, iteration: int, model: list[torch.nn.Module], optimizer: Any, scheduler: Any) -> None:
    """Write this rank's part of the model and the optimizer, while all ranks do the same."""
    args = importlib.import_module("megatron.training").get_args()
    optimizers = optimizers_of(optimizer)
    scalers = [getattr(part, "grad_scaler", None) for part in optimizers]
    content = {
        "world_size": torch.distributed.get_world_size(),
        "training": {
            "iteration": iteration,
            "consumed_train_samples": args.consumed_train_samples,
            "scheduler": scheduler.state_dict(),
            "grad_scalers": [scaler.state_dict() for scaler in scalers if scaler is not None],
        },
        "scaling": _scaling(model),
        "pieces": [
            asdict(piece)
            for index, chunk in enumerate(model)
            for piece in pieces_of_chunk(index, chunk, optimizers, tied=not args.untie_embeddings_and_output_weights)
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / f"rank_{torch.distributed.get_rank():05d}.pt")


def _scaling(model: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    scaling_by_module: Any = importlib.import_module(
        "megatron_on_cpu.fp8_scaling"
    ).scaling_by_module  # imports names of this module
    return {name: values for chunk in model for name, values in scaling_by_module(chunk).items()}


def pieces_of_chunk(index: int, chunk: Any, optimizers: list[Any], *, tied: bool) -> Iterator[Piece]:
    """Yield this rank's part of every parameter of a model chunk."""
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    while hasattr(chunk, "module"):
        chunk = chunk.module
    layers = names_of_layers(chunk)
    for local_name, parameter in chunk.named_parameters():
        is_expert = not getattr(parameter, "allreduce", True)
        copy = [parallel_state.get_pipeline_model_parallel_rank(), index]
        if is_expert:
            copy.append(parallel_state.get_expert_model_parallel_rank())
            tensor_rank = parallel_state.get_expert_tensor_parallel_rank()
        else:
            tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        start, state, settings = optimizer_part(parameter, optimizers)
        yield Piece(
            name=name_in_model(local_name, layers, chunk.config, tied=tied),
            copy=tuple(copy),
            tensor_rank=tensor_rank,
            partition_dim=parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None,
            sections=_sections(local_name, parameter, _config_of(chunk, local_name)),
            weight=_values(parameter).detach().cpu().clone(),
            start=start,
            state=state,
            settings=settings,
        )


def _values(parameter: Any) -> torch.Tensor:
    """Return a parameter, or the values of one in fp8: Transformer Engine's class has its own `dequantize`."""
    values: torch.Tensor = parameter
    return values if type(parameter).dequantize is torch.Tensor.dequantize else parameter.dequantize()


def _config_of(chunk: Any, local_name: str) -> Any:
    """Return the configuration of a parameter's module: a vision tower has another than the language model."""
    found, module = chunk.config, chunk
    for part in local_name.split(".")[:-1]:
        module = getattr(module, part)
        own = getattr(module, "config", None)
        found = own if hasattr(own, "gated_linear_unit") else found
    return found


def _sections(local_name: str, parameter: torch.nn.Parameter, config: Any) -> tuple[int, ...]:
    # The part of an adapter for both the gate and the up projection.
    in_parts = local_name.endswith(
        (".linear_in.weight", ".adapter_gate.linear_out.weight", ".adapter_up.linear_out.weight")
    )
    if config.gated_linear_unit and ".linear_fc1." in local_name and not in_parts:
        return (parameter.shape[0] // 2,) * 2
    if local_name.endswith((".self_attention.in_proj.weight", ".self_attention.conv1d.weight")):
        return _sections_of_net(config, projected="in_proj" in local_name)
    return tuple(getattr(parameter, "partition_sizes", ()))  # a Mamba mixer's


def _sections_of_net(config: Any, *, projected: bool) -> tuple[int, ...]:
    """Return the rows of query, key and value of a gated delta net, and if `projected` of z, beta and alpha."""
    ranks = config.tensor_model_parallel_size
    keys = config.linear_num_key_heads * config.linear_key_head_dim // ranks
    values = config.linear_num_value_heads * config.linear_value_head_dim // ranks
    heads = config.linear_num_value_heads // ranks
    return (keys, keys, values, *((values, heads, heads) if projected else ()))


def names_of_layers(chunk: torch.nn.Module) -> dict[str, tuple[str, dict[str, str]]]:
    """For each layer of this chunk: its name in the whole model, and how checkpoints name the modules in it."""
    return {
        name: (_layer_in_model(name, module), module.submodules_config.sharded_state_dict_keys_map)
        for name, module in chunk.named_modules()
        if _LAYER.fullmatch(name) and hasattr(module, "layer_number")  # not of a vision tower
    }


def _layer_in_model(name: str, module: Any) -> str:
    if name.startswith("mtp."):
        return name.replace("mtp_model_layer", "transformer_layer")
    return f"{name.rpartition('.')[0]}.{module.layer_number - 1}"


def name_in_model(local_name: str, layers: dict[str, tuple[str, dict[str, str]]], config: Any, *, tied: bool) -> str:
    """Translate a parameter's name in its chunk to the one that does not depend on the layout or on the layer spec."""
    if tied and local_name.endswith("output_layer.weight"):
        return local_name.removesuffix("output_layer.weight") + "embedding.word_embeddings.weight"
    layer = _LAYER.match(local_name)
    if layer is None or layer[0] not in layers:
        return local_name
    layer_name, renamed_modules = layers[layer[0]]
    rest = local_name.removeprefix(layer[0] + ".")
    for module_name, name_in_checkpoint in renamed_modules.items():
        if rest.startswith(module_name):
            rest = name_in_checkpoint + rest.removeprefix(module_name)
            break
    expert = _LOCAL_EXPERT.fullmatch(rest) or _GROUPED_EXPERT.fullmatch(rest)
    if expert is not None:
        parallel_state = importlib.import_module("megatron.core.parallel_state")
        experts_per_rank = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        number = parallel_state.get_expert_model_parallel_rank() * experts_per_rank + int(expert["number"])
        rest = f"{expert['before']}experts.{number}.{expert['rest']}"
    return f"{layer_name}.{rest}"


def assemble(folder: Path | str, *, copies_may_differ: bool = False) -> dict[str, torch.Tensor]:
    """Put a dump together into whole parameters.

    Args:
        folder: where the ranks' files are.
        copies_may_differ: of copies on several pipeline stages, take the first stage's.

    Raises:
        ValueError: if copies of the same values differ in a bit, or values are missing.
    """
    pieces_by_name: dict[str, list[Piece]] = defaultdict(list)
    for content in _contents(folder):
        for piece in content["pieces"]:
            pieces_by_name[piece["name"]].append(Piece(**piece))
    tensors = {}
    for name, pieces in sorted(pieces_by_name.items()):
        for kind in ("weight", *_STATE_NAMES):
            if kind == "weight" or any(kind in piece.state for piece in pieces):
                tensors[f"{kind}.{name}"] = _merge(f"{kind}.{name}", kind, pieces, copies_may_differ)
    return tensors


def training_state(folder: Path | str) -> dict[str, Any]:
    """Return the iteration, consumed samples, scheduler and gradient scalers, on which all ranks must agree."""
    return _common("training state", [content["training"] for content in _contents(folder)])


def scaling_state(folder: Path | str) -> dict[str, torch.Tensor]:
    """Return the fp8 scales and histories of the whole model's modules, on which ranks must agree."""
    found: dict[str, torch.Tensor] = {}
    for content in _contents(folder):
        for name, values in content["scaling"].items():
            _require_same_bits(name, found.setdefault(name, values), values)
    return found


def parameter_settings(folder: Path | str) -> dict[str, dict[str, Any]]:
    """Return the options of every parameter's group (learning rate, step, ...), on which ranks must agree."""
    settings: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for content in _contents(folder):
        for piece in content["pieces"]:
            if piece["state"]:
                settings[piece["name"]].append(piece["settings"])
    return {name: _common(name, found) for name, found in sorted(settings.items())}


def _common(what: str, values: list[dict[str, Any]]) -> dict[str, Any]:
    for value in values[1:]:
        if value != values[0]:
            raise ValueError(f"{what}: ranks disagree: {values[0]} and {value}")
    return values[0]


def _contents(folder: Path | str) -> Iterator[dict[str, Any]]:
    files = sorted(Path(folder).glob("rank_*.pt"))
    if not files:
        raise ValueError(f"no dump in {folder}")
    for file in files:
        content = torch.load(file, weights_only=False)
        if content["world_size"] != len(files):
            raise ValueError(f"{len(files)} files in {folder}, but {content['world_size']} ranks")
        yield content


def _merge(what: str, kind: str, pieces: list[Piece], copies_may_differ: bool) -> torch.Tensor:
    """Merge all the pieces of one tensor: shards to copies, copies to one, tensor-parallel parts to the whole."""
    copies: dict[tuple[int, ...], dict[int, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for piece in pieces:
        copies[piece.copy][piece.tensor_rank].append(piece)
    wholes = []
    for parts_by_rank in copies.values():
        parts = [_whole_part(what, kind, parts_by_rank[rank]) for rank in sorted(parts_by_rank)]
        if pieces[0].partition_dim is None:
            wholes += parts
        else:
            wholes.append(_concatenate(parts, pieces[0].partition_dim, pieces[0].sections))
    for whole in () if copies_may_differ else wholes[1:]:
        _require_same_bits(what, wholes[0], whole)
    return wholes[0]


def _concatenate(parts: list[torch.Tensor], dim: int, sections: tuple[int, ...]) -> torch.Tensor:
    if sections:
        by_section = zip(*(part.split(sections, dim) for part in parts), strict=True)
        parts = [part for section in by_section for part in section]
    return torch.cat(parts, dim)


def _whole_part(what: str, kind: str, pieces: list[Piece]) -> torch.Tensor:
    """Return one tensor-parallel rank's part from the pieces of all data-parallel ranks."""
    if kind == "weight":
        for piece in pieces[1:]:
            _require_same_bits(what, pieces[0].weight, piece.weight)
        return pieces[0].weight
    whole = torch.zeros(pieces[0].weight.numel(), dtype=torch.float32)
    covered = torch.zeros(whole.numel(), dtype=torch.bool)
    for piece in pieces:
        if kind not in piece.state:
            continue
        shard = piece.state[kind]
        span = slice(piece.start, piece.start + shard.numel())
        _require_same_bits(what, whole[span][covered[span]], shard[covered[span]])
        whole[span] = shard
        covered[span] = True
    if not covered.all():
        raise ValueError(f"{what}: no rank has {int((~covered).sum())} of {covered.numel()} elements")
    return whole.view(pieces[0].weight.shape)


def _require_same_bits(what: str, one: torch.Tensor, other: torch.Tensor) -> None:
    if one.dtype != other.dtype or one.shape != other.shape:
        raise ValueError(f"{what}: copies have different types or shapes")
    if not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
        raise ValueError(f"{what}: copies that must be the same differ")
