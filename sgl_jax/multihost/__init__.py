"""Runs one engine over several hosts: the group, and the channel of host 0's commands."""
