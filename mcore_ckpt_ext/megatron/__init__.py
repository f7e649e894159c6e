"""Decides how a live Megatron job loads a checkpoint, and loads it."""
