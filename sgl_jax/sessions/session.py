"""Sessions as conversations: their tokens and turns. Memory is not handled here.

A *streaming* session is a growing list of tokens: each turn appends, one at a time, and a turn
that fails leaves the session where it was (`streaming.py`). A *regular* session is a tree of turns,
each the continuation of another, computed like any other request (`tree.py`). `SessionLeases` and
the prefix cache hold the KV of both.

Both kinds may have to *amend* a turn that has ended: its client turns out to have seen less of it
than the session has, since a stop string was found late (`StopRequest`), or nothing, since it had
gone (`AbortRequest`). A turn that was sent before that was known, and continues the amended one,
is *built on* tokens that the session no longer has (`built_on`).
"""

from sgl_jax.sessions.streaming import StreamingSession
from sgl_jax.sessions.tree import RegularSession

Session = StreamingSession | RegularSession
