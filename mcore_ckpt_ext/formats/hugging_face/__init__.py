"""Folders that `transformers` loads."""
