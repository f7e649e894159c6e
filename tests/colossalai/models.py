"""Small modules with every kind of entry that a state dict can hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 97
HIDDEN = 32


class TinyGPT(nn.Module):
    """A tied embedding, a layer without bias, and layers that several chunks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=index > 0) for index in range(3))
        self.norm = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(tokens)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return self.lm_head(self.norm(hidden))


class Counted(nn.Linear):
    """A layer with extra state, which is no tensor."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen = 3

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Versioned(Counted):
    """A layer with extra state and a buffer, which saves its bias under another name since its version 2."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.register_buffer("statistics", torch.arange(3.0))
        self._register_state_dict_hook(_renames)
        self.register_load_state_dict_pre_hook(_renames_back)


def _renames(module: Any, state: Any, prefix: str, _: Any) -> None:
    state[f"{prefix}shift"] = state.pop(f"{prefix}bias")


def _renames_back(module: Any, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
    if metadata.get("version", 1) >= 2:
        state[f"{prefix}bias"] = state.pop(f"{prefix}shift")


class Everything(TinyGPT):
    """Buffers of all kinds between the parameters, extra state, a module under two names, frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, HIDDEN))
        self.register_buffer("steps", torch.tensor([7]))
        self.register_buffer("mask", torch.ones(HIDDEN), persistent=False)
        self.counted = Counted(HIDDEN, HIDDEN)
        self.again = self.counted
        self.batch_norm = nn.BatchNorm1d(HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN)
        self.frozen.requires_grad_(False)
        self.ignored = nn.Parameter(torch.linspace(-1, 1, HIDDEN))
        self.register_parameter("absent", None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(tokens) * self.scale * self.mask
        hidden = self.frozen(hidden) + self.counted(hidden) + self.again(hidden) * self.ignored.detach()
        hidden = self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return self.lm_head(self.norm(hidden))


class Wide(nn.Module):
    """150 MiB in fp32, in layers of one size."""

    LAYERS, WIDTH = 24, 1280

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(self.LAYERS))


def gpt2(vocabulary: int = VOCABULARY) -> Any:
    """Hugging Face's GPT-2, tied; by default with a vocabulary that two ranks cannot share evenly."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary, n_positions=16, n_embd=HIDDEN, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
            attn_implementation="eager",
        )
    )  # fmt: skip


def t5() -> Any:
    """Hugging Face's T5: one embedding module under three names, tied to the head."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip
