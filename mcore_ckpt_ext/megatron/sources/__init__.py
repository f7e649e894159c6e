"""Checkpoints of any format, presented in the form in which a Megatron loader requests its own."""
