"""Formats of tool calls, one a file: what a model writes to call a tool."""
