"""The tenant of a request: its API key's, else the one that the field `user` names, else none."""

from fastapi import Request

from sgl_jax.core.messages import USER_PREFIX, Tenant
from sgl_jax.server.api_keys import caller_of


def tenant_of(request: Request, user: str | None) -> Tenant | None:
    """The tenant of `request`, whose body has this field `user`."""
    tenant = caller_of(request).tenant
    if tenant is None and user:
        return Tenant(name=USER_PREFIX + user)
    return tenant
