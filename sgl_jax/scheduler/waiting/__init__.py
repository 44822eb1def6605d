"""Requests without memory, in the order in which they are tried."""
