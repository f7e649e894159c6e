"""Checkpoint formats: each reads files into slices of model space, and writes slices back to files."""
