"""The clients' side of an engine: checks of requests, streams of results, traces."""
