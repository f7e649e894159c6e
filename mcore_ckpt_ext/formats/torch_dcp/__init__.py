"""Megatron's format `torch_dcp`, of jobs with `--use-torch-fsdp2`."""
