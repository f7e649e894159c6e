"""Messages for checkpoints of any format: contradictions, ignored sidecars, and joined remainders."""

from __future__ import annotations

from mcore_ckpt_ext.errors import join_some
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_contradiction
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR_FILE
from mcore_ckpt_ext.model_space.anatomy import pipelined_block
from mcore_ckpt_ext.model_space.names import split_layer
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER, WEIGHT
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_number


def contradictions(checkpoint: CheckpointView) -> list[str]:
    """Return contradictions between metadata and stored content."""
    about_vocabulary = vocabulary_contradiction(checkpoint)
    messages = [about_vocabulary] if about_vocabulary else []
    names = checkpoint.names(WEIGHT)
    count = checkpoint.job.arguments().num_layers
    block = pipelined_block(names)
    layers = {layer.number for layer, _ in map(split_layer, names) if layer is not None and layer.block == block}
    if layers and count and count != len(layers):
        messages.append(f"the arguments say num_layers {count}, but {len(layers)} are stored")
    folder = checkpoint.files.folder
    iteration = checkpoint.job.iteration()
    named = iteration_number(folder)
    if named is not None and "iteration" not in checkpoint.job.common():
        messages.append(f"it does not record its iteration: that of its folder, {folder.name}, is used")
    elif named is not None and named != iteration:
        messages.append(f"it records iteration {iteration}, but its folder is {folder.name}")
    return messages


def general_notices(checkpoint: CheckpointView) -> list[str]:
    """Return notes for a user who converts a checkpoint of any format."""
    notices = contradictions(checkpoint)
    found_sidecar = checkpoint.job.found_sidecar()
    notices += [f"{SIDECAR_FILE} is ignored: {found_sidecar.problem}"] if found_sidecar.problem else []
    state = checkpoint.optimizer.state() if checkpoint.optimizer.format() else None
    if state is not None and found_sidecar.sidecar is not None:
        doubts = [doubt for buffers in state.buffers for doubt in buffers.sidecar_problems()]
        notices += [f"{SIDECAR_FILE} is ignored: {join_some(doubts, 1)}"] if doubts else []
    if state is not None and PARAM_REMAINDER in state.kinds:
        state.names()  # recovers the packing, which `order_sources` needs
        sources = " and ".join(state.order_sources())
        notices.append(
            f"masters are joined of bf16 weights and int16 remainders, placed by {sources}, and written whole: stock "
            "Megatron takes them up without --use-precision-aware-optimizer"
        )
    return notices
