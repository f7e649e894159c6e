"""Hugging Face model families: names and rows of their tensors, and their configurations."""
