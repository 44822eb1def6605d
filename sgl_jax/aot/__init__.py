"""Compiling an engine's steps for chips that are not there, and reading what they cost."""
