"""Overlap arithmetic and its result, the plan: pure data, no I/O."""
