"""Overlap arithmetic and plans of reads and writes, as pure data without I/O."""
