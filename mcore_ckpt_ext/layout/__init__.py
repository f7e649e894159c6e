"""What a parallel layout does to a model: which parameters a rank holds, and where they lie in its gradient buffers."""
