"""The layout-free format of this package: safetensors and JSON."""
