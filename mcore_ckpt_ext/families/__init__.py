"""Hugging Face model families: declarations of their tensors' names and rows, and of their configurations."""
