"""What is known of a Megatron job before any of its checkpoints is read."""
