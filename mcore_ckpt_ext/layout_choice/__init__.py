"""The parallel layouts that Megatron accepts for a model, and the memory of each: pure arithmetic, no I/O."""
