"""The self-test: its training jobs, starting the ranks, and its report.

This folder does not import Megatron: the ranks run `mcore_ckpt_ext.megatron.selftest`.
"""
