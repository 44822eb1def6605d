"""Counters and histograms of the engine."""
