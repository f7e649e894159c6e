"""The optimizer format of an imagined release 0.21: a module of `optimizers/`, and a row of `job/releases.py`.

It holds arrays shaped like the weights, as in `fully_reshardable`, under its own keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from mcore_ckpt_ext.job.releases import Capability
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.optimizers.model_space_state import ModelSpaceState
from mcore_ckpt_ext.optimizers.optimizer_format import CHAIN, Encoding, Holder, StoredKeys
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.versions import Version

GLOBAL_TENSORS = "global_tensors"
_KEY = re.compile(CHAIN + r"optimizer\.tensors\.")

LOADS_GLOBAL_TENSORS = Capability(
    "loads `global_tensors`", "megatron/core/optimizer/distrib_optimizer.py, imagined", since=Version(0, 21)
)


def _claims(keys: StoredKeys) -> set[str]:
    return {key for key in keys.arrays if _KEY.match(key)}


def _read(holder: Holder, keys: StoredKeys, models: Callable[[], LocalModels]) -> OptimizerState:
    arrays = {key.replace(".tensors.", ".state.", 1): array for key, array in keys.arrays.items()}
    return ModelSpaceState(replace(keys, arrays=arrays))


ENCODINGS = (
    Encoding(
        name=GLOBAL_TENSORS,
        stored="arrays shaped like the weights, in a tree of their own",
        written_by="DistributedOptimizer since 0.21, by default",
        claims=_claims,
        read=_read,
        stock_loads=LOADS_GLOBAL_TENSORS,
    ),
)
