"""Sessions: conversations that clients go on with, turn by turn, and the calls about them.

A *streaming* session is a growing list of tokens: each turn appends, one at a time, and a turn
that fails leaves the session where it was (`streaming`). A *regular* session is a tree of turns,
each the continuation of another, computed like any other request (`tree`). `store` keeps the open
sessions by id; `service` answers the calls and keeps the store and the ranks' memory in step. Only
tokens and turns are handled here: `SessionLeases` and the prefix cache hold the KV, and a turn is a
request like any other, which the scheduler runs.

Both kinds may have to *amend* a turn that has ended: its client turns out to have seen less of it
than the session has, since a stop string was found late (`StopRequest`), or nothing, since it had
gone (`AbortRequest`). A turn that was sent before that was known, and continues the amended one,
is *built on* tokens that the session no longer has (`built_on`).
"""
