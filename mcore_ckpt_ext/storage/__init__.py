"""Bytes on disk: positioned reads, torch archives, safe unpickling, atomic publishing."""
