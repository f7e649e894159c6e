"""The saves of a job: each is planned, written, finalized and committed, or leaves nothing."""
