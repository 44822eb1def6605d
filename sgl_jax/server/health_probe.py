"""The probe behind `/health_generate`: whether the engine generates tokens.

A token of any request is proof. The probe sends a one-token request only if no other request is in
flight, or no token came for a second, so it costs a busy engine nothing. That request is exempt
from queue limits. However many clients probe, at most one such request is in flight. Requests are
at least `_INTERVAL_S` apart, or `_INTERVAL_AFTER_ERROR_S` after a request without a token: on a
device that fails every step, each failure counts towards the limit at which the engine ends.
"""

import asyncio
import time

from msgspec.structs import replace

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.front.frontend import Frontend
from sgl_jax.engine.front.request_stream import RequestStream

_INTERVAL_S = 0.1
# For each client that probes, up to a second: receiving a request and sending its answer take about
# 1 ms, so clients that probe without a pause use about 1/40 of the server's core.
_CLIENT_INTERVAL_S = 0.04
_INTERVAL_AFTER_ERROR_S = 5.0  # equals the interval of the engine's probe steps
_OTHERS_TIME_S = 1.0  # wait for a token of other requests before sending a request
_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


class HealthProbe:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._request: RequestStream | None = None  # the last probe, possibly in flight
        self._num_waiting = 0
        self._sent_at = -_INTERVAL_S

    async def finds_token(self, timeout_s: float) -> bool:
        """Wait for a token that the engine sends from now on. Return False if none came in time.

        Raises `EngineDeadError` or `ShuttingDownError` if no token will come.
        """
        self._num_waiting += 1
        try:
            return await self._wait_for_token(timeout_s)
        finally:
            self._num_waiting -= 1

    async def _wait_for_token(self, timeout_s: float) -> bool:
        before, began_at = self._frontend.num_tokens, time.monotonic()
        while self._frontend.num_tokens == before:
            self._frontend.check_alive()
            waited_s = time.monotonic() - began_at
            if waited_s >= timeout_s:
                return False
            if not self._frontend.num_open or waited_s >= _OTHERS_TIME_S:
                self._send()
            await asyncio.sleep(min(max(_INTERVAL_S, self._num_waiting * _CLIENT_INTERVAL_S), 1.0))
        return True

    def _send(self) -> None:
        now_s, interval_s = time.monotonic(), _INTERVAL_S
        if self._request is not None:
            if not self._request.has_ended:
                return
            if not self._request.num_output_tokens:
                interval_s = _INTERVAL_AFTER_ERROR_S
        if now_s - self._sent_at >= interval_s:
            self._sent_at = now_s
            request = replace(self._frontend.checks.prepare([0], _ONE_TOKEN), is_probe=True)
            self._request = self._frontend.submit(request, lambda: None, streaming=False)
