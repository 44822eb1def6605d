"""Which waiting requests start, and what memory is kept for those that run."""
