"""Tests of `mcore_ckpt_ext/selftest`."""
