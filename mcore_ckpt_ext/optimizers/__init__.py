"""The optimizer formats: a table of encodings, and a module for each way of storing state."""
