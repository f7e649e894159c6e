"""Samples of which ``--eod-mask-loss`` leaves out different numbers of tokens: a plugin of ``launch.run``.

As prompts do; the mock data set alone has a mask in few samples.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

LONGEST = 27  # of 32 tokens


def install() -> None:
    """Wrap `__getitem__` of Megatron's data set."""
    datasets: Any = importlib.import_module("megatron.core.datasets.gpt_dataset")
    original = datasets.GPTDataset.__getitem__

    @functools.wraps(original)
    def __getitem__(self: Any, number: int | None) -> dict[str, Any]:  # noqa: N807
        sample: dict[str, Any] = original(self, number)
        if self.config.eod_mask_loss:
            mask = sample["loss_mask"].clone()
            mask[: int(sample["tokens"][0]) % (LONGEST + 1)] = 0.0
            sample["loss_mask"] = mask
        return sample

    datasets.GPTDataset.__getitem__ = __getitem__


if __name__ == "<run_path>":  # as a plugin
    install()
