"""Session ids by caller: each has ids of its own, and sees no others.

The engine knows a session by one id. That of a caller's session begins with the caller's name, so
that no caller can list, continue, close or collide with the sessions of others. An admin, and
every caller where there are no API keys, uses the engine's ids as they are. The name of a tenant
that the field `user` names follows: its sessions are found under that name alone.
"""

from urllib.parse import quote

from fastapi import Request
from msgspec.structs import replace

from sgl_jax.core.messages import USER_PREFIX, SessionTurn, Tenant
from sgl_jax.server.api_keys import Caller, caller_of


class SessionOwner:
    """The sessions of one caller and tenant; an admin's without a tenant: all of them."""

    def __init__(self, caller: Caller, tenant: Tenant | None = None) -> None:
        names = [] if caller.is_admin else [caller.name]
        if tenant is not None and tenant.name.startswith(USER_PREFIX):
            names.append(tenant.name)
        self._prefix = "".join(f"{quote(name, safe='')}:" for name in names)

    def engine_id(self, session_id: str) -> str:
        """How the engine calls the caller's session `session_id`."""
        return self._prefix + session_id

    def client_id(self, engine_id: str) -> str | None:
        """How the caller calls a session; None if it belongs to another."""
        return engine_id[len(self._prefix) :] if engine_id.startswith(self._prefix) else None

    def own(self, turn: SessionTurn | None) -> SessionTurn | None:
        """A turn of the caller's session."""
        return turn if turn is None else replace(turn, id=self.engine_id(turn.id))

    def as_told(self, message: str) -> str:
        """A sentence of the engine, with the session's id as the caller knows it."""
        return message.replace(f"'{self._prefix}", "'") if self._prefix else message


def owner_of(request: Request, tenant: Tenant | None) -> SessionOwner:
    """The sessions that `request` of `tenant` may use."""
    return SessionOwner(caller_of(request), tenant)
