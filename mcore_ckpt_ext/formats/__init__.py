"""One module a format: from its bytes to slices of model space."""
