"""Checkpoints that a bug of a framework has altered: recognized by their evidence, and read as intended."""
