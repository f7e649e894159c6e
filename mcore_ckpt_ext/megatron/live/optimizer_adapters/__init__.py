"""Adapters to the masters and moments of live optimizers: a module for each kind, one protocol."""
