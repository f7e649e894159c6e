"""Describes a Megatron job, independently of its checkpoints."""
