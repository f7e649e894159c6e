"""The parallel layouts that Megatron accepts for a model, and the memory of each: no I/O."""
