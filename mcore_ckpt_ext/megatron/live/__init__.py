"""Describes a running job: its live optimizer as slices of model space."""
