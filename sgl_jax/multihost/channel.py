"""The authenticated channel between host 0 and the other hosts. Must not import jax.

    host 0   CoordinatorLink   XPUB  <===== CurveZMQ over TCP =====>  XSUB x 2  WorkerLink   host k

Host 0 sends each message to all other hosts with one call. Each of these has two connections, one
per topic. `COMMANDS` arrive, in order, in its loop. `BEATS` are heartbeats of both sides, sent
every second by a separate thread. A host silent for too long is lost, and so is a command that did
not arrive: both end the group.

Both sides derive their Curve25519 keys from the group's secret. A peer without the secret cannot
complete the handshake, so none of its messages is read, and a recorded handshake cannot be replayed
(http://curvezmq.org). Sending never blocks: ZeroMQ's thread encrypts and writes.
"""

import hashlib
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from sgl_jax.core.errors import HOST_LOST
from sgl_jax.multihost.group import MultihostGroup

COMMANDS, BEATS = b"commands", b"beats"  # topics: the first frame of each message of host 0
BEAT_INTERVAL_S = 1.0
WATCH_INTERVAL_S = 0.1
LAST_MESSAGES_S = 2.0  # for messages sent before a link closes


def end_process(reason: str) -> None:
    """End this process at once, because its group is lost. The last line printed is the reason."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(HOST_LOST)


class Keys(NamedTuple):
    """Curve25519 keys in ZeroMQ's text form (Z85)."""

    public: bytes
    secret: bytes

    @classmethod
    def derived(cls, secret: str, role: str) -> "Keys":
        """Derive the keys of a role, 'coordinator' or 'worker', in the group of `secret`."""
        salt = f"sgl_jax hosts {role}".encode()
        raw = hashlib.scrypt(secret.encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=32)
        encoded: bytes = z85.encode(raw)
        return cls(zmq.curve_public(encoded), encoded)


def curve_socket(
    context: "zmq.Context[Any]", kind: int, own: Keys, options: Mapping[Any, int | bytes]
) -> "zmq.Socket[bytes]":
    """Return a socket with a link's keys and options, and unbounded queues."""
    made: zmq.Socket[bytes] = context.socket(kind)
    # No limit on queued messages: few steps are in flight, so queues stay short.
    shared = {zmq.IPV6: 1, zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: 0}
    keys = {zmq.CURVE_PUBLICKEY: own.public, zmq.CURVE_SECRETKEY: own.secret}
    for option, value in {**shared, **keys, **options}.items():
        made.setsockopt(option, value)
    return made


def url_of(group: MultihostGroup) -> str:
    """Return the group's URL for ZeroMQ, with a numeric address, which a bind requires."""
    found = socket.getaddrinfo(group.address, group.port, type=socket.SOCK_STREAM)
    address = str(found[0][4][0])
    return f"tcp://[{address}]:{group.port}" if ":" in address else f"tcp://{address}:{group.port}"
