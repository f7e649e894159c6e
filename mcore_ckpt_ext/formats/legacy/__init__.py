"""Megatron's legacy format `torch`: the files of each model-parallel rank."""
