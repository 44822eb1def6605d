"""The start of waiting requests, and the memory that is reserved for running ones."""
