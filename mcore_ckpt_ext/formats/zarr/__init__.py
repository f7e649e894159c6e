"""Megatron's format `zarr`, removed in 0.16."""
