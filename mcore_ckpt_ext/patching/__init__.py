"""Replacing functions of frameworks that may not be imported yet, and undoing it without a trace."""
