"""Folders of adapters that `peft` loads."""
