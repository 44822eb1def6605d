"""Thousands of malformed HTTP requests over raw sockets; the server must not notice.

`python -m tests.hostile.http_fuzz --requests 10000 --seed 1` starts the real server, sends the
cases of `http_mutations.py`, and says what was wrong: an answer of 5xx other than 503, an answer
that is no HTTP or no error envelope, a connection that neither ends nor is answered, a traceback in
the log, memory that is not accounted for, or a known answer that has changed.
"""

import argparse
import asyncio
import contextlib
import http.client
import io
import json
import random
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httpx

from tests.hostile.http_mutations import Case, mutated
from tests.live.live_server import LiveServer, live_server

FLAGS = (
    *("--context-length", "256", "--max-running-requests", "4", "--max-queued-requests", "64"),
    *("--check-memory", "busy", "--memory-error-action", "crash", "--receive-timeout", "1"),
    *("--keep-alive-timeout", "5"),  # each case reads until its connection is closed
    *("--served-model-name", "default", "--decode-log-interval", "0"),
)
NUM_CLIENTS = 24
# Far more than the server's own limits: 1 s to receive, 5 s of keeping a connection alive.
LONGEST_S = 60.0
MAX_FAILURES = 20
_BATCH = 250  # after each, a known answer is asked for
_SHOWN_BYTES = 400
_DEFECT = b"the server failed on this request"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_KNOWN = {
    "input_ids": [321, 400, 555, 310],
    "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
}


class HttpFuzz:
    """The cases of one seed, sent to a running server; `failures` says what was wrong."""

    def __init__(self, server: LiveServer, seed: int) -> None:
        self.statuses: Counter[int] = Counter()  # 0: closed without an answer
        self.num_sent = 0
        self.failures: list[str] = []
        self._server = server
        self._port = urlsplit(server.url).port
        self._seed = seed
        self._known = self._known_answer()

    def run(self, num_requests: int) -> None:
        """Send so many cases, fewer if too much fails, then look at what they left."""
        for start in range(0, num_requests, _BATCH):
            asyncio.run(self._batch(range(start, min(start + _BATCH, num_requests))))
            if len(self.failures) >= MAX_FAILURES:
                break
            try:
                if (answer := self._known_answer()) != self._known:
                    self.failures.append(f"{self._known} became {answer} after case {start}")
            except httpx.HTTPError as error:
                self.failures.append(f"no known answer after case {start}: {error!r}")
                break
        self._check_rest()

    def summary(self) -> str:
        """What was answered, and what was wrong."""
        answers = ", ".join(f"{status}: {n:,}" for status, n in sorted(self.statuses.items()))
        lines = [f"{self.num_sent:,} cases of seed {self._seed}; answers by status: {answers}"]
        lines += [f"FAILED: {failure}" for failure in self.failures] or ["all well"]
        return "\n".join(lines)

    # -- one case ---------------------------------------------------------------------------

    async def _batch(self, numbers: range) -> None:
        left = iter(numbers)

        async def client() -> None:
            for number in left:
                await self._one(number)

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))

    async def _one(self, number: int) -> None:
        case = mutated(random.Random(f"{self._seed} {number}"))
        self.num_sent += 1
        try:
            async with asyncio.timeout(LONGEST_S):
                data = await self._send(case)
        except TimeoutError:
            self._fail(number, case, f"neither answered nor closed within {LONGEST_S:g} s")
            return
        except OSError as error:
            self._fail(number, case, f"no connection: {error}")
            return
        if case.ending == "vanish":
            return
        try:
            self._judge(data, case.method)
        except (AssertionError, http.client.HTTPException, ValueError) as error:
            self._fail(number, case, f"{type(error).__name__}: {error}; {data[:_SHOWN_BYTES]!r}")

    async def _send(self, case: Case) -> bytes:
        """All that the server answers until it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            with contextlib.suppress(OSError):  # it may close before it has read all
                for piece in case.pieces:
                    writer.write(piece)
                    await writer.drain()
                if case.ending == "half":
                    writer.write_eof()
            received = bytearray()
            if case.ending != "vanish":
                with contextlib.suppress(ConnectionError):
                    while data := await reader.read(65_536):
                        received += data
            else:  # with a reset
                reset = struct.pack("ii", 1, 0)
                with contextlib.suppress(OSError):
                    writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, reset
                    )
            return bytes(received)
        finally:
            writer.close()

    def _judge(self, data: bytes, method: str) -> None:
        """Raise if these are not good answers to one or more requests."""
        assert _DEFECT not in data, "a defect"
        try:
            answers = list(_answers(data, method))
        except http.client.HTTPException:
            if method != "HEAD":
                raise
            # It has a body, as it should not, unless the head was not read to its end.
            answers = list(_answers(data, "GET"))
            assert {status for status, _, _ in answers} <= {400, 408, 431}, "HEAD got a body"
        for status, _, _ in answers or [(0, "", b"")]:
            self.statuses[status] += 1
        for status, kind, body in answers:
            assert status < 500 or status == 503, f"status {status}"
            if status >= 400 and method != "HEAD":
                assert kind == "application/json", f"status {status} of {kind}"
                assert json.loads(body)["error"]["message"], "an error without words"

    def _fail(self, number: int, case: Case, text: str) -> None:
        sent = b"|".join(case.pieces)[:_SHOWN_BYTES]
        self.failures.append(f"case {number} ({case.ending}) {sent!r}: {text}")

    # -- what is left -----------------------------------------------------------------------

    def _known_answer(self) -> list[int]:
        answer = httpx.post(self._server.url + "/generate", json=_KNOWN, timeout=LONGEST_S)
        answer.raise_for_status()
        return cast(list[int], answer.json()["output_ids"])

    def _check_rest(self) -> None:
        try:
            self._server.close_sessions()
            self._server.assert_nothing_leaked()
            self._server.assert_flush_frees_everything()
        except (AssertionError, httpx.HTTPError) as error:
            self.failures.append(f"at rest: {error!r}")
        log = self._server.log.read_text(errors="replace")
        if (at := log.find("Traceback")) >= 0:
            self.failures.append(f"a traceback: {log[max(0, at - 500) : at + 2000]}")


class _Received(io.BytesIO):
    """What `http.client` reads answers from, one after the other: it may not close it."""

    def makefile(self, _mode: str) -> "_Received":
        return self

    def close(self) -> None:
        """Another answer may follow."""


def _answers(data: bytes, method: str) -> list[tuple[int, str, bytes]]:
    """Status, content type and body of each answer in `data`.

    Raises:
        http.client.HTTPException: this is no HTTP.
    """
    answers = []
    data = data.replace(_CONTINUE, b"")  # no answer, though no other may follow
    received = _Received(data)
    while received.tell() < len(data):
        answer = http.client.HTTPResponse(cast(socket.socket, received), method=method)
        answer.begin()
        body = answer.read()
        kind = (answer.headers.get("content-type") or "").partition(";")[0]
        answers.append((answer.status, kind, body))
        if answer.status == 101:
            raise http.client.HTTPException("it changed its protocol")
    return answers


def main() -> int:
    """The exit code: 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.http_fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="cases (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the cases (%(default)s)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sgl_jax-fuzz-"))
    with live_server(folder, *FLAGS) as server:
        start_s = time.monotonic()
        fuzz = HttpFuzz(server, args.seed)
        fuzz.run(args.requests)
        print(fuzz.summary())
        print(f"{time.monotonic() - start_s:.0f} s; the server's log is {server.log}")
    return int(bool(fuzz.failures))


if __name__ == "__main__":
    sys.exit(main())
