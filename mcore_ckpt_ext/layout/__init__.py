"""Maps a model to a parallel layout: the parameters of each rank, and their places in its gradient buffers."""
