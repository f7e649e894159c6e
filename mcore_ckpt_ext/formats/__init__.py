"""The formats of checkpoints: from their bytes to slices of model space, and back to files."""
