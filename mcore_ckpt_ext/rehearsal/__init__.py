"""A resume on simulated ranks, up to the first write: what a job would do, without Megatron and without a GPU."""
