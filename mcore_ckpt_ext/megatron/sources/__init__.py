"""Presents checkpoints of any format to a Megatron loader in the form that it requests."""
