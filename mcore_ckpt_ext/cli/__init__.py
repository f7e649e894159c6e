"""The command line `mcore-ckpt`: results go to stdout, progress and messages to stderr."""
