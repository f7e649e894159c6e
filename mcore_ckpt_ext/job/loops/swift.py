"""Recognizes the arguments of ms-swift, which it stores in place of Megatron's."""

from __future__ import annotations

from typing import Final

MARK: Final = "mcore_model"
"""An argument that only ms-swift has.

Many others have the names of Megatron's (`MegatronArguments`, swift/megatron/arguments/megatron_args.py, 4.6.0).
"""
