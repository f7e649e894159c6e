"""Tests that need a GPU: `python -m pytest tests/gpu -rs -s`. Without one, they are skipped."""
