"""The self-test: which training jobs it runs, how their ranks are started, and what is reported of them.

Nothing here imports Megatron: `mcore_ckpt_ext.megatron.selftest` is what runs in the ranks.
"""
