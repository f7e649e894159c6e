"""Test which parameters that ranks hold as one can be stored as one."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.layout.parameter_parts import check_recoverable

WEIGHT = "decoder.layers.0.mixer.in_proj.weight"


def test_the_parts_of_a_gated_delta_product_are_not_recovered() -> None:
    mixer = [f"{WEIGHT}.{part}" for part in ("x", "z", "C", "B", "dt")]
    check_recoverable([*mixer, "decoder.layers.0.mixer.D"])
    product = [f"{WEIGHT}.{part}" for part in ("z", "V0", "K0", "Q", "b0", "a")]
    with pytest.raises(UnsupportedCheckpointError, match="found: z, V0, K0, Q, b0, a; where: .*in_proj.weight; hint"):
        check_recoverable(product)
