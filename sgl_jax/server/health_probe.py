"""The probe behind `/health_generate`: whether the engine generates tokens.

A token of any request proves it. The probe sends a request of one token only if no other is in
flight, or no token came for a second, so it costs a busy engine nothing. No limit of the queue
refuses that request. At most one is in flight, and they are at least `_INTERVAL_S` apart, or
`_INTERVAL_AFTER_ERROR_S` after one that got no token, however many clients probe: on a device that
fails every step, each counts towards the limit at which the engine ends.
"""

import asyncio
import time

from msgspec.structs import replace

from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.engine.front.frontend import Frontend
from sgl_jax.engine.front.request_stream import RequestStream

_INTERVAL_S = 0.1
_INTERVAL_AFTER_ERROR_S = 5.0  # as between the engine's own steps after a failure
_OTHERS_TIME_S = 1.0  # for a token of other requests, before the probe sends its own
_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


class HealthProbe:
    """Probes one server's engine."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._request: RequestStream | None = None  # the last one, which may be in flight yet
        self._sent_at = -_INTERVAL_S

    async def finds_token(self, timeout_s: float) -> bool:
        """Wait for a token that the engine sends from now on; False if none came in time.

        Raises `EngineDeadError`, `ShuttingDownError`: none will come.
        """
        before, began_at = self._frontend.num_tokens, time.monotonic()
        while self._frontend.num_tokens == before:
            self._frontend.check_alive()
            waited_s = time.monotonic() - began_at
            if waited_s >= timeout_s:
                return False
            if not self._frontend.num_open or waited_s >= _OTHERS_TIME_S:
                self._send()
            await asyncio.sleep(_INTERVAL_S)
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
