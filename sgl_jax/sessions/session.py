"""Sessions as the conversations they are: tokens and turns, without a thought for memory.

A *streaming* session is a growing list of tokens: each turn appends, one at a time, and a turn
that fails leaves the session where it was (`streaming.py`). A *regular* session is a tree
of turns, each the continuation of another, computed like any other request
(`tree.py`). Where the KV of either lies is the business of `SessionLeases` and the
prefix cache.

Both kinds may have to *amend* a turn that has ended: its client turns out to have seen less of it
than the session has, since a stop string was found late (`StopRequest`), or nothing, since it had
gone (`AbortRequest`). Whatever was sent before that was known, and continues the turn, was built
on something that never was (`built_on`).
"""

from sgl_jax.sessions.streaming import StreamingSession
from sgl_jax.sessions.tree import RegularSession

Session = StreamingSession | RegularSession
