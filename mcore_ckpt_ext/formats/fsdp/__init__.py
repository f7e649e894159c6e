"""Megatron-FSDP's format `fsdp_dtensor`."""
