"""The files that Megatron-Bridge needs in a `torch_dist` checkpoint.

These are `run_config.yaml` and `train_state.pt`.

Sources: `load_checkpoint` (training/checkpointing.py) and `TrainState` (training/state.py) of megatron-bridge 0.2.1 to
0.6.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.errors import ContentError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.description import run_config_of
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.job.loops.bridge import COUNTED, RUN_CONFIG, harmless, with_facts
from mcore_ckpt_ext.job.model_arguments import complete
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.write_plan import OutputFile
from mcore_ckpt_ext.storage.archive_writer import archive_of
from mcore_ckpt_ext.storage.yaml_text import dump_yaml


def run_config_file(checkpoint: CheckpointView, random_states: bool) -> tuple[OutputFile, list[str]]:
    """Return `run_config.yaml`, and notes for its user.

    Args:
        checkpoint: the source.
        random_states: whether the states of the random generators are carried over.

    Raises:
        UnsupportedCheckpointError: the tensor or pipeline parallel size that it was written under is unknown.
    """
    content, notes = _content(checkpoint)
    layout = checkpoint.job.layout
    if layout.unknown & {"tensor", "pipeline"}:
        raise UnsupportedCheckpointError(
            "Megatron-Bridge needs the layout that the checkpoint was written under, which is unknown",
            where=checkpoint.job.arguments().source,
            hint="pass it: --source-tensor-model-parallel-size and so on",
        )
    has_optimizer = checkpoint.optimizer.format() is not None
    content = with_facts(
        content,
        {"tensor_model_parallel_size": layout.tensor, "pipeline_model_parallel_size": layout.pipeline},
        {
            "save_optim": has_optimizer,
            "save_rng": random_states,
            "fully_parallel_save": True,
            "ckpt_format": "torch_dist",
            "dist_ckpt_optim_fully_reshardable": has_optimizer,
        },
    )
    text = dump_yaml(content).encode()
    return OutputFile(RUN_CONFIG, len(text), ((0, text),)), notes


def _content(checkpoint: CheckpointView) -> tuple[Mapping[str, Any], list[str]]:
    """Return the content of the source's `run_config.yaml`, or one made from its arguments."""
    run_config = run_config_of(checkpoint.files.folder)
    if run_config is not None:
        kept, emptied = harmless(run_config)
        return kept, [f"left out of {RUN_CONFIG}: {place}, which Megatron-Bridge would run" for place in emptied]
    # These modules import all families, which takes as long as writing a small checkpoint.
    from mcore_ckpt_ext.families.bridge import bridge_model, import_notices, model_fields
    from mcore_ckpt_ext.families.recognition import family_of_megatron

    tokenizer = {"tokenizer": {"vocab_size": checkpoint.job.tokens}} if checkpoint.job.tokens else {}
    rows = {"vocab_size": vocabulary_rows(checkpoint), "should_pad_vocab": False}
    section: dict[str, Any] = {}
    try:
        model = complete(checkpoint.job.arguments())
        arguments = checkpoint.job.arguments()
        # Incomplete arguments are not filled up with defaults.
        section = {
            name: value
            for name, value in model_fields(model).items()
            if arguments.is_complete or arguments.is_set(name)
        }
        fit = family_of_megatron(model, checkpoint.names(WEIGHT))
    except ContentError as error:
        without = f"{RUN_CONFIG} names no model class, since the model's family is unknown"
        notes = [f"{without}: training resumes, but AutoBridge cannot export it"]
        if not section:
            return {"model": {}, **tokenizer}, [*notes, f"{RUN_CONFIG} does not describe the model: {error}"]
        return {"model": {**section, **rows}, **tokenizer}, notes
    described = {**bridge_model(fit.family, fit.arguments), **rows}
    return {"model": described, **tokenizer}, import_notices(fit.family, fit.arguments)


def train_state(checkpoint: CheckpointView) -> bytes:
    """Return the bytes of `train_state.pt`: tensors with one element, by name."""
    arguments = checkpoint.job.arguments().raw
    counts = {name: int(arguments.get(name) or 0) for name in COUNTED}
    operations = float(checkpoint.job.common().get("num_floating_point_operations_so_far") or 0)
    state = {
        "step": torch.tensor(checkpoint.job.iteration(), dtype=torch.int64),
        **{name: torch.tensor(count, dtype=torch.int64) for name, count in counts.items()},
        "floating_point_operations_so_far": torch.tensor(operations, dtype=torch.float64),
        **{name: torch.tensor(False) for name in ("do_train", "do_valid", "do_test")},
    }
    return archive_of(state)
