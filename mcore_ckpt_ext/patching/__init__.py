"""Replaces functions of frameworks that may not be imported yet, and restores them."""
