"""Forecasts of output lengths and memory, and the test whether a request fits them."""
