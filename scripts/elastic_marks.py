"""Plugin of workers: the first rank prints when the choice of the layout and the load begin and end."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any


def mark(module_name: str, name: str, part: str) -> None:
    """Wrap a function that is a part of a start."""
    module: Any = importlib.import_module(module_name)
    original = getattr(module, name)

    @functools.wraps(original)
    def call_and_print(*positional: Any, **keywords: Any) -> Any:
        print(f"[mark] {part} begins", flush=True)
        result = original(*positional, **keywords)
        print(f"[mark] {part} ends", flush=True)
        return result

    setattr(module, name, call_and_print)


if os.environ["RANK"] == "0":
    mark("mcore_ckpt_ext.megatron.elastic.layout", "apply_layout", "choice")
    mark("megatron.training.training", "load_checkpoint", "load")
