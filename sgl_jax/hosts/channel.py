"""The authenticated channel between host 0 and the other hosts. Must not import jax.

    host 0   LeaderLink   XPUB  <===== CurveZMQ over TCP =====>  XSUB x 2  FollowerLink   host k

Host 0 sends each message to all other hosts by one call. Each of them has two connections, one a
topic: `COMMANDS` come, in order, to its loop; by `BEATS` both sides show every
second that they live, on a thread beside the loop. A host that is silent for longer than allowed
is lost, and so is a command that did not arrive: both end the group.

Both sides derive their Curve25519 keys from the group's secret, so a peer without it completes no
handshake: it is refused before one of its messages is read, and a recorded handshake cannot be
replayed (http://curvezmq.org). Sending never blocks: ZeroMQ's own thread encrypts and writes.
"""

import hashlib
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from sgl_jax.core.exit_codes import HOST_LOST
from sgl_jax.hosts.group import HostGroup

COMMANDS, BEATS = b"commands", b"beats"  # topics, the first frame of each message of host 0
BEAT_INTERVAL_S = 1.0
WATCH_INTERVAL_S = 0.1
LAST_MESSAGES_S = 2.0  # for messages that were sent before a link closes


def end_process(reason: str) -> None:
    """End this process at once, since its group is lost; the reason is the last line it prints."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(HOST_LOST)


class Keys(NamedTuple):
    """Curve25519 keys as ZeroMQ writes them (Z85)."""

    public: bytes
    secret: bytes

    @classmethod
    def derived(cls, secret: str, role: str) -> "Keys":
        """The keys of a role, 'leader' or 'follower', in the group of `secret`."""
        salt = f"sgl_jax hosts {role}".encode()
        raw = hashlib.scrypt(secret.encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=32)
        encoded: bytes = z85.encode(raw)
        return cls(zmq.curve_public(encoded), encoded)


def curve_socket(
    context: "zmq.Context[Any]", kind: int, own: Keys, options: Mapping[Any, int | bytes]
) -> "zmq.Socket[bytes]":
    """A socket with a link's keys and options; it queues any number of messages."""
    made: zmq.Socket[bytes] = context.socket(kind)
    # No limit of queued messages: steps in flight are few, so queues stay short.
    shared = {zmq.IPV6: 1, zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: 0}
    keys = {zmq.CURVE_PUBLICKEY: own.public, zmq.CURVE_SECRETKEY: own.secret}
    for option, value in {**shared, **keys, **options}.items():
        made.setsockopt(option, value)
    return made


def url_of(group: HostGroup) -> str:
    """The address as ZeroMQ takes it, for a bind too: a number in place of a name."""
    found = socket.getaddrinfo(group.address, group.port, type=socket.SOCK_STREAM)
    address = str(found[0][4][0])
    return f"tcp://[{address}]:{group.port}" if ":" in address else f"tcp://{address}:{group.port}"
