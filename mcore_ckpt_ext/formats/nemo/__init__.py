"""The `weights` folders of NeMo 2."""
