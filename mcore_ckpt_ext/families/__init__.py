"""Model families of Hugging Face: names and rows of their tensors, and their configuration. Pure and declarative."""
