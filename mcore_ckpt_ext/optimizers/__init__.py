"""How an optimizer's state lies in a checkpoint: one table of encodings, and a module for each way of storing."""
