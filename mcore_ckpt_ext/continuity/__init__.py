"""Training that goes on under another layout: the order of its data, and what it computes."""
