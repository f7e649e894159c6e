"""Logits of scaled-down published configurations: those of transformers, and the case that Megatron computes.

Weights are in fp32, whatever the file says; sizes are those of `scripts/scaled_configs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scaled_configs import VOCABULARY

import mcore_ckpt_ext
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.target import LayerSpec
from tests.harness.published_configs import configuration, make_published

TOLERANCE, OWN_ROUNDINGS = 1e-5, 3
"""Largest difference, relative to the largest logit; or so many times the rounding of transformers itself."""
INNER_NORMS = ("q_a_layernorm", "kv_a_layernorm")
"""Norms whose epsilon transformers fixes, whatever `rms_norm_eps` is: a conversion notes it (families/deepseek.py)."""
TOKENS = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True)
class ExpectedLogits:
    """The logits of transformers, `[2, 40, vocabulary]`, and the tolerance, relative to the largest of them."""

    logits: torch.Tensor
    tolerance: float

    def excess(self, logits: torch.Tensor) -> float:
        """Return the largest difference of other logits as a multiple of the tolerance."""
        return _difference(logits[..., :VOCABULARY], self.logits) / self.tolerance


def expected_logits(name: str, folder: Path, *, decodes_differently: bool = False) -> ExpectedLogits:
    """Make the model of a configuration in `model` of a new folder, and compute its logits.

    Args:
        name: the configuration.
        folder: the new folder.
        decodes_differently: rounding differs noticeably if the model decodes token by token.
    """
    config = configuration(name)
    for part in (config, config.get("text_config") or {}):
        part |= {key: "float32" for key in ("torch_dtype", "dtype") if part.get(key)}
    folder.mkdir()
    model = make_published(config, folder / "model")
    for label, module in model.named_modules():
        if label.endswith(INNER_NORMS):
            module.variance_epsilon = model.config.rms_norm_eps
    with torch.no_grad():
        logits = model(TOKENS).logits
        rounding = _difference(_token_by_token(model), logits) if decodes_differently else 0.0
    return ExpectedLogits(logits, max(TOLERANCE, OWN_ROUNDINGS * rounding))


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())


def _token_by_token(model: Any) -> torch.Tensor:
    """Compute the same logits with the model's cache."""
    found, cache = [], None
    for step in TOKENS.split(1, dim=1):
        output = model(step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, dim=1)


def megatron_case(name: str, folder: Path, spec: LayerSpec, tokens: Path) -> dict[str, Any]:
    """Convert the model of the folder, and return the case for two ranks: TP2, or EP2 if it has experts.

    `tokens`: the file with `TOKENS`.
    """
    mcore_ckpt_ext.convert(folder / "model", folder / "run", mcore_ckpt_ext.TorchDist(transformer_impl=spec))
    checkpoint = open_checkpoint(folder / "model", transformer_impl=spec).format.reader
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    experts = 2 if checkpoint.model_arguments.num_experts else 1
    # Megatron shares an indexer among tensor-parallel ranks with sequence parallelism only.
    tensor = 1 if experts > 1 or "dsa" in str(checkpoint.model_arguments.get("experimental_attention_variant")) else 2
    return {
        "name": name, "layout": "TP2" if tensor > 1 else "EP2", "run": str(folder / "run"), "tensor": tensor,
        "expert": experts, "vocabulary": VOCABULARY, "answer": str(folder / "answer"), "tokens": str(tokens),
        "flags": [*checkpoint.training_flags(), "--transformer-impl", spec],
    }  # fmt: skip
