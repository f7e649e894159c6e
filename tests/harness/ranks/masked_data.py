"""Plugin for `pretrain_bert.py` and `pretrain_t5.py` of a checkout: training data, and the local layer spec.

Their own data sets need a corpus, a vocabulary of words and a compiled helper. BERT's script always imports the layer
spec of Transformer Engine by name; T5's local spec takes its last norm from there (core_v0.12.0 to 0.16.1).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDatasetConfig
from megatron.core.models.bert import bert_layer_specs
from megatron.core.models.T5 import t5_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

LENGTH, TOKENS, SAMPLES = 32, 96, 1000
WHOLE = ("loss_mask", "padding_mask", "enc_mask", "dec_mask")


class Masked(torch.utils.data.Dataset[dict[str, Any]]):
    """Random tokens under all names that either script uses."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(number)
        tokens = {
            name: torch.randint(TOKENS, (LENGTH,), generator=random)
            for name in ("text", "labels", "text_enc", "text_dec")
        }
        whole = {name: torch.ones(LENGTH, dtype=torch.int64) for name in WHOLE}
        return {**tokens, **whole, "types": tokens["text"] % 2, "is_random": number % 2}


def make(builder: Any, *_: Any, **__: Any) -> None:
    """Skip the preparation of data."""


bert_layer_specs.bert_layer_with_transformer_engine_spec = bert_layer_specs.bert_layer_local_spec
t5_spec.TENorm = WrappedTorchNorm
BlendedMegatronDatasetBuilder.__init__ = make
BlendedMegatronDatasetBuilder.build = lambda builder: (Masked(), Masked(), Masked())
for config in (BERTMaskedWordPieceDatasetConfig, T5MaskedWordPieceDatasetConfig):
    config.__post_init__ = make
