"""Maps a model to a parallel layout: each rank's parameters, and their places in gradient buffers."""
