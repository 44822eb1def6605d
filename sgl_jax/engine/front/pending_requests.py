"""The limits of requests that have no output yet."""

from sgl_jax.core.errors import InvalidRequestError, QueueFullError, TenantQueueFullError
from sgl_jax.core.shares import Shares, Tenant, holder_of, tenant_text

# Of the images of these requests.
_MAX_PIXEL_BYTES = 2**31


class PendingRequests:
    """Requests without any output so far: sent, waiting, or computing their first token.

    They are limited here, because the channel to the engine is unbounded while the engine does not
    read it. After a disconnect a request still counts, because its message still exists.
    """

    def __init__(self, max_queued: int, num_rows: int, share_part: float) -> None:
        """Create the limits of an engine that runs `num_rows` requests and queues `max_queued`."""
        self._max_queued = max_queued
        self._num_rows = num_rows
        self._shares = Shares(max_queued + num_rows, share_part, max_queued)
        self._holders: dict[str, str] = {}  # by rid: the tenant charged for the request
        self._pixel_bytes: dict[str, int] = {}  # by rid, of requests with images

    def add(self, rid: str, tenant: Tenant | None, pixel_bytes: int = 0) -> None:
        self._holders[rid] = holder_of(tenant)
        self._shares.add(self._holders[rid], 1)
        if pixel_bytes:
            self._pixel_bytes[rid] = pixel_bytes

    def remove(self, rid: str) -> None:
        """Remove a request at its first output; do nothing afterwards."""
        holder = self._holders.pop(rid, None)
        if holder is not None:
            self._shares.add(holder, -1)
            self._pixel_bytes.pop(rid, None)

    def check_room(
        self, num_requests: int, tenant: Tenant | None = None, pixel_bytes: int = 0
    ) -> None:
        """Raise if `num_requests` more requests of `tenant` cannot be accepted now.

        `pixel_bytes` is the size of the next one's images.

        Raises:
            InvalidRequestError: there are too many of them to be ever accepted together, or too
                many pixels.
            QueueFullError: the engine's queue is full, or has too many images.
            TenantQueueFullError: the tenant's share of the queue is full.
        """
        if pixel_bytes > _MAX_PIXEL_BYTES:
            raise InvalidRequestError(
                f"the images of a request may have {_MAX_PIXEL_BYTES} bytes, got {pixel_bytes}",
                "images",
            )
        if pixel_bytes and sum(self._pixel_bytes.values()) + pixel_bytes > _MAX_PIXEL_BYTES:
            raise QueueFullError(
                f"the images of waiting requests would exceed {_MAX_PIXEL_BYTES} bytes"
            )
        holder, num_rows = holder_of(tenant), self._num_rows
        num_held = self._shares.held_by(holder)
        if tenant is not None and tenant.max_queued:
            _check_fits(num_requests, tenant.max_queued, f"tenant {tenant.name!r} may queue")
            most = tenant.max_queued + min(tenant.max_running or num_rows, num_rows)
            limits = f"{tenant.max_queued} that wait and {most - tenant.max_queued} that run"
        else:
            most, alone = self._shares.most(holder), self._shares.most_alone
            if alone < self._shares.total:
                _check_fits(num_requests, alone, f"{tenant_text(holder)} may have in the queue")
            limits = f"{most} that it may have now (--tenant-share)"
        most_of_all = self._max_queued + num_rows
        _check_fits(
            num_requests, most_of_all, "the engine holds (--max-queued-requests and those it runs)"
        )
        if len(self._holders) + num_requests > most_of_all:
            raise QueueFullError(
                f"the queue is full: {len(self._holders)} requests wait for the engine, and "
                f"{num_requests} more would exceed the limit of --max-queued-requests "
                f"({self._max_queued})"
            )
        if num_held + num_requests > most:
            raise TenantQueueFullError(
                f"{num_held} requests of {tenant_text(holder)} wait for the engine, and "
                f"{num_requests} more would exceed its limits of {limits}"
            )


def _check_fits(num_requests: int, most: int, holder: str) -> None:
    if num_requests > most:
        raise InvalidRequestError(
            f"prompts times n must be no more than {holder}: at most {most}, got {num_requests}"
        )
