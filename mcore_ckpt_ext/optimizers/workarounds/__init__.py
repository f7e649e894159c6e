"""Checkpoints altered by a framework's bug, which are recognized by content and read as intended."""
