"""The table of Megatron's arguments: one row for each, in `run.py`, `model.py`, `other.py` and `without_effect.py`."""
