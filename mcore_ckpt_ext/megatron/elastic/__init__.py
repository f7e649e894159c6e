"""A job that goes on by itself with another number of ranks (`--ckpt-ext-layout auto`)."""
