"""Megatron's `torch_dist`, its default format."""
