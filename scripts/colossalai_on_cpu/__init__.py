"""Runs the genuine ColossalAI on CPU ranks, for this project's tests and benchmarks.

Put the folder above this one on ``PYTHONPATH``. Call ``redirect.install()`` before the first import of
``colossalai.zero`` (gemini_optimizer.py of 0.5.0 requests the device when its class is created), then ``ranks.run``.
The product package ``mcore_ckpt_ext`` never imports anything from here, and nothing here imports the product.
"""
