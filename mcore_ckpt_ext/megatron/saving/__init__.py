"""The saves of a job: each is planned, written, finalized and published, or leaves nothing."""
