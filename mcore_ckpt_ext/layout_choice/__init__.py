"""Which parallel layouts Megatron accepts for a model, and what each of them needs: pure arithmetic, no I/O."""
