"""Formats of tool calls and reasoning: tables, and code for irregular formats."""
