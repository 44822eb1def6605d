"""Forecasts output lengths and memory, and tests whether a request fits the forecast."""
