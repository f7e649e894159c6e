"""A running job: its live optimizer as slices of model space, and the agreement of its ranks."""
