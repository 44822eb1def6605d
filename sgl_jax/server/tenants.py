"""The tenant of a request: its API key's, else the one that the field `user` names, else none."""

from fastapi import Request

from sgl_jax.core.messages import Tenant
from sgl_jax.server.api_keys import caller_of

# No name of a key holds a space, so a client cannot name the tenant of a key.
_USER_PREFIX = "user "


def tenant_of(request: Request, user: str | None) -> Tenant | None:
    """The tenant of `request`, whose body has this field `user`."""
    tenant = caller_of(request).tenant
    if tenant is None and user:
        return Tenant(name=_USER_PREFIX + user)
    return tenant


def is_named_by_user(tenant: str) -> bool:
    """Whether a client, not the operator, chose the tenant's name."""
    return tenant.startswith(_USER_PREFIX)
