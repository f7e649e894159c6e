"""A simulated resume up to its first write, with simulated ranks, without Megatron and without a GPU."""
