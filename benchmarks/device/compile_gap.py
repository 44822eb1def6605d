"""Gaps in streams at the first structured request: `python -m benchmarks.device.compile_gap`.

    python -m benchmarks.device.compile_gap [--model-path DIR] [--streams 4] [--compile-s 5]

An engine core serves some streams. A request with a grammar arrives, and its programs are compiled
in another thread; each compilation takes `--compile-s` longer than usual. The longest gaps between
two tokens of a stream are compared with the gaps in an equal time afterwards, when nothing is
compiled.

Cyclic garbage is collected between steps, as in the engine process: a collection that Python starts
in the compiling thread stops all streams for a fifth of a second. On a CPU, XLA's compilation takes
cores and threads that steps need too; on an accelerator it does not. The second run finds all
programs in the compilation cache and shows the gaps of the loop without compilation.
"""

import argparse
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import DEMO_MODEL
from sgl_jax.core.engine_messages import EngineMessage, OutputBatch
from sgl_jax.core.messages import GenerateRequest, Shutdown
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.channels import InProcessChannel
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.engine.loop.garbage import collect_if_many, schedule_collection
from sgl_jax.executor.buckets import Bucket
from sgl_jax.executor.programs import Programs

_STRUCTURED = "structured"
_SETTLING_S = 2.0


class Streams:
    """The front of `core`: sends requests, and keeps when each stream got tokens."""

    def __init__(self, core: EngineCore) -> None:
        self._channel = InProcessChannel(self._receive)
        self._times_s: dict[str, list[float]] = {}
        self._structured_ended = threading.Event()
        self._loop = threading.Thread(
            target=core.run, args=(self._channel,), kwargs={"after_turn": collect_if_many}
        )
        self._loop.start()

    def submit(self, rid: str, **sampling: Any) -> None:
        """Send a greedy request with prompt [5, 6, 7] to the engine."""
        params = SamplingParams(temperature=0.0, **sampling)
        self._channel.inbox.put(GenerateRequest(rid=rid, input_ids=[5, 6, 7], sampling=params))

    def run_structured(self) -> tuple[float, float]:
        """Send a request with a grammar; return the times at which it was sent and ended."""
        start_s = time.perf_counter()
        self.submit(_STRUCTURED, max_new_tokens=16, regex="[0-9]{8}")
        self._structured_ended.wait()
        return start_s, time.perf_counter()

    def gaps_ms(self, start_s: float, end_s: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return milliseconds between tokens of unstructured streams in that time, ascending."""
        streams = [np.array(times) for rid, times in self._times_s.items() if rid != _STRUCTURED]
        within = [times[(times >= start_s) & (times < end_s)] for times in streams]
        return np.sort(1e3 * np.concatenate([np.diff(times) for times in within]))

    def close(self) -> None:
        self._channel.inbox.put(Shutdown())
        self._loop.join()

    def _receive(self, message: EngineMessage) -> None:
        if not isinstance(message, OutputBatch):
            return
        now_s = time.perf_counter()
        gained = {output.rid for output in message.outputs if output.token_ids}
        for rid in gained.union(message.rids):
            self._times_s.setdefault(rid, []).append(now_s)
        if any(output.rid == _STRUCTURED and output.finish for output in message.outputs):
            self._structured_ended.set()


def slow_halves(compile_s: float) -> Any:
    """Return a `Programs.halves` that sleeps `compile_s` more before it compiles."""
    halves = Programs.halves

    def slow(programs: Programs, bucket: Bucket) -> Any:
        if bucket not in programs._halves:
            time.sleep(compile_s)
        return halves(programs, bucket)

    return slow


def main(argv: Sequence[str] | None = None) -> None:
    """Print the gaps while programs are compiled, and afterwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, default=DEMO_MODEL)
    parser.add_argument("--load-format", default="auto", help="dummy: a folder without weights")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--compile-s", type=float, default=5.0, help="for each shape (5)")
    options = parser.parse_args(argv)
    args = ServerArgs(
        model_path=str(options.model_path),
        load_format=options.load_format,
        max_running_requests=options.streams + 1,
        chunked_prefill_size=32,
        decode_log_interval=0,
        warmup="plain",
    )
    with patch.object(Programs, "halves", slow_halves(options.compile_s)):
        core = EngineCore(args)
        schedule_collection()
        streams = Streams(core)
        for number in range(options.streams):
            streams.submit(f"{number}", max_new_tokens=8000, ignore_eos=True)
        time.sleep(_SETTLING_S)
        start_s, end_s = streams.run_structured()
        time.sleep(end_s - start_s + _SETTLING_S)
        counts = core.executor.compile_counts()
        streams.close()
    seconds = end_s - start_s
    during = streams.gaps_ms(start_s, end_s)
    after = streams.gaps_ms(end_s + _SETTLING_S, end_s + _SETTLING_S + seconds)
    print(f"the structured request took {seconds:.1f} s; {counts}")
    for name, gaps in (("compiling", during), ("afterwards", after)):
        p50, p999 = np.percentile(gaps, (50, 99.9))
        print(f"{name:>10}: {len(gaps)} gaps, ms: p50 {p50:.1f}, p99.9 {p999:.1f}, {gaps[-1]:.1f}")
    print(f"longest gap: {during[-1] / after[-1]:.2f} times that without")


if __name__ == "__main__":
    main()
