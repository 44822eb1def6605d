"""Formats of tool calls and reasoning: tables, and code where a format differs from all others."""
