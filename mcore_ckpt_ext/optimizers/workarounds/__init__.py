"""Checkpoints altered by a bug of a framework, which are recognized by their content and read as intended."""
