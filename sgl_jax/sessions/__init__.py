"""Sessions: conversations that clients continue turn by turn, and the calls that manage them.

A *streaming* session is a growing list of tokens (`streaming`). Its turns run one at a time and
append; a failed turn leaves the session unchanged. A *regular* session is a tree of turns, each of
which continues another (`tree`). `store` keeps the open sessions by id. `service` handles the
calls, and keeps the store and the ranks' memory consistent. Sessions hold only tokens:
`SessionLeases` and the prefix cache hold the KV, and the scheduler runs a turn as any other
request.

Both kinds may have to *amend* an ended turn if its client received less than the session recorded:
a stop string was found late (`StopRequest`), or the client disconnected (`AbortRequest`). A later
turn that continues the amended turn, and was sent before the amendment, is *built on* tokens that
the session no longer has (`built_on`).
"""
