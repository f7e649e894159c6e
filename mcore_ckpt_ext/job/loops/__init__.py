"""Job descriptions of training loops other than Megatron's, read without importing those loops."""
