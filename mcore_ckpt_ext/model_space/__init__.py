"""Model space: the layout-free view of a checkpoint. Names, kinds, logical tensors, regions, slices."""
