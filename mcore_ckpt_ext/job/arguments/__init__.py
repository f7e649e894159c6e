"""The table of Megatron's arguments: one row for each, in `run.py`, `model.py`, `unread.py` and `without_effect.py`."""
