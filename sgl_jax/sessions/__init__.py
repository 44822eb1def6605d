"""Sessions: conversations that clients go on with, turn by turn, and the calls about them.

`session` says what the two kinds are (`streaming`, `tree`); `store` keeps those that are open, by
id; `service` answers the calls and keeps the store and the ranks' memory in step. A turn itself is
a request like any other, which the scheduler runs.
"""
