"""Synthetic loads: our scheduler next to simple ones, on a logical clock."""
