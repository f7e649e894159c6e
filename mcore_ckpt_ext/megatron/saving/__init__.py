"""Every save of a job as one thing: planned, written, finalised and published, or not there at all."""
