"""Block stores below host memory: a folder or a distributed store."""
