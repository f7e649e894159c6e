"""The table of Megatron's arguments, with one row for each.

The rows are in `run.py`, `model.py`, `other.py` and `without_effect.py`.
"""
