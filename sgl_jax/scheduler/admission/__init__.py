"""Starts waiting requests, and reserves memory for running ones."""
