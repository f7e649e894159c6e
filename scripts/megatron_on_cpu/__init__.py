"""Runs the genuine Megatron-LM on CPU ranks, for this project's tests and its demonstration.

Put the folder above this one on ``PYTHONPATH``.  Start with ``launch.run`` (or ``python -m megatron_on_cpu.launch``).
The product package ``mcore_ckpt_ext`` never imports anything from here, and nothing here imports the product.
"""
