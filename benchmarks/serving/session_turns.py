r"""The cost of a turn in a streaming session, against sending the whole conversation again.

    python -m benchmarks.serving.session_turns --base-url http://127.0.0.1:30000 \
        --label "radix cache" --output turns.jsonl
    python -m benchmarks.serving.session_turns --plot turns.jsonl docs/images/session_turns.svg
    python -m benchmarks.serving.session_turns --num-sessions 8 --num-turns 150

The first command measures: for each length of the history, one conversation is brought to that
length, and then grows by short turns. Each turn is taken twice: in the session, which gets only the
new tokens, and without one, which gets them all. Random tokens, greedy, a few tokens out. Medians
over the turns; the two ways alternate, so that other load on the machine affects both alike.

The second command draws earlier measurements. The third takes many turns of several sessions at
once, and prints how much slower the last turns are than the sessions' first turns, and than the
first turns of new sessions. Its server needs `--max-running-requests` of twice as many, since each
session keeps a row.
"""

import argparse
import json
import random
import statistics
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from sgl_jax.planner.plot_file import figure_class

_TOKENS = range(300, 700)  # of any vocabulary


class Point(NamedTuple):
    """Latency of a turn after `history_len` tokens, both ways."""

    label: str
    history_len: int
    session_ms: float
    resend_ms: float
    session_cached: int  # tokens of the last turn's prompt that were not computed
    resend_cached: int

    def line(self) -> str:
        return (
            f"| {self.label} | {self.history_len:,} | {self.session_ms:.1f} | "
            f"{self.resend_ms:.1f} | {self.resend_ms / self.session_ms:.2f} | "
            f"{self.session_cached:,} | {self.resend_cached:,} |"
        )


HEADER = (
    "| server | tokens of history | in a session, ms | sent whole, ms | ratio | "
    "cached, session | cached, whole |\n|---|---|---|---|---|---|---|"
)


class Client:
    """The few calls that the measurement makes, on one connection after another."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url.rstrip("/")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Post JSON and return the response's JSON, or None if its body is empty."""
        request = urllib.request.Request(
            self._base_url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            text = response.read()
        return json.loads(text) if text else None

    def generate(
        self, tokens: list[int], num_output: int, session_id: str | None
    ) -> tuple[list[int], int, float]:
        """Return output tokens, the number of cached tokens, and the milliseconds it took."""
        body: dict[str, Any] = {
            "input_ids": tokens,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": num_output,
                "ignore_eos": True,
            },
        }
        if session_id is not None:
            body["session_params"] = {"id": session_id}
        start = time.perf_counter()
        answer = self.post("/generate", body)
        elapsed_ms = 1000 * (time.perf_counter() - start)
        return answer["output_ids"], answer["meta_info"]["cached_tokens"], elapsed_ms

    def num_evicted_sessions(self) -> int:
        """Return the number of sessions that the server has evicted since its start."""
        with urllib.request.urlopen(self._base_url + "/get_server_info", timeout=60) as response:
            return int(json.load(response)["counters"]["sessions_evicted"])


def measure(
    client: Client, label: str, history_len: int, num_turns: int, num_new: int, num_output: int
) -> Point:
    """Measure `num_turns` turns after a conversation of `history_len` tokens."""
    rng = random.Random(history_len)
    session_id = client.post("/open_session", {"capacity_of_str_len": 0, "streaming": True})
    history = rng.choices(_TOKENS, k=history_len - num_output)
    output, _, _ = client.generate(history, num_output, session_id)
    history += output
    times: dict[str, list[float]] = {"session": [], "resend": []}
    cached = {"session": 0, "resend": 0}
    for _ in range(num_turns):
        new = rng.choices(_TOKENS, k=num_new)
        output, cached["session"], ms = client.generate(new, num_output, session_id)
        times["session"].append(ms)
        again, cached["resend"], ms = client.generate(history + new, num_output, None)
        times["resend"].append(ms)
        if again != output:
            print(f"outputs differ after {len(history)} tokens: a near tie?", file=sys.stderr)
        history += new + output
    client.post("/close_session", {"session_id": session_id})
    return Point(
        label,
        history_len,
        statistics.median(times["session"]),
        statistics.median(times["resend"]),
        cached["session"],
        cached["resend"],
    )


def measure_growth(
    client: Client, num_sessions: int, num_turns: int, num_new: int, num_output: int
) -> str:
    """Return the latency of the last fifth of turns over the first fifth's and new sessions'.

    Sessions take all their turns. Then they take a fifth more, alternating with as many new
    sessions that take their first turns, so that other load on the machine affects both alike. The
    very first turn, which opens a history, is not counted.

    Raises RuntimeError if the server did not keep all of these sessions in place. Each session
    holds a row, so the server needs `--max-running-requests` of twice as many.
    """
    part = max(num_turns // 5, 1)
    evicted = client.num_evicted_sessions()
    with ThreadPoolExecutor(num_sessions) as pool:
        old = _Conversations(client, pool, num_sessions, num_new, num_output)
        turns = [old.take_turn() for _ in range(num_turns)]
        new = _Conversations(client, pool, num_sessions, num_new, num_output)
        new.take_turn()
        beside = [(old.take_turn(), new.take_turn()) for _ in range(part)]
        old.close()
        new.close()
    evicted = client.num_evicted_sessions() - evicted
    missed = old.num_not_in_place + new.num_not_in_place
    if evicted or missed:
        raise RuntimeError(
            f"{evicted} sessions were evicted and {missed} turns did not find all of the turn "
            f"before in place: serve with --max-running-requests {2 * num_sessions} and more memory"
        )
    first_ms, last_ms = _median(turns[1 : 1 + part]), _median(turns[-part:])
    old_ms, new_ms = (_median(side) for side in zip(*beside, strict=True))
    return (
        f"{num_sessions} sessions x {num_turns} turns of {num_new} + {num_output} tokens, medians: "
        f"first {part} turns {first_ms:.1f} ms, last {part} {last_ms:.1f} ms, ratio "
        f"{last_ms / first_ms:.2f}; {part} turns more {old_ms:.1f} ms, those of new sessions in "
        f"between {new_ms:.1f} ms, ratio {old_ms / new_ms:.2f}; every turn found the one before in "
        "place"
    )


def _median(turns: Iterable[list[float]]) -> float:
    return statistics.median(ms for turn in turns for ms in turn)


class _Conversations:
    """Streaming sessions that take their turns together."""

    def __init__(
        self, client: Client, pool: ThreadPoolExecutor, count: int, num_new: int, num_output: int
    ) -> None:
        self._client = client
        self._pool = pool
        self._num_new, self._num_output = num_new, num_output
        opening = {"capacity_of_str_len": 0, "streaming": True}
        self._ids = [client.post("/open_session", opening) for _ in range(count)]
        self._rngs = [random.Random(seed) for seed in range(count)]
        self._history_len = 0
        self.num_not_in_place = 0  # turns that had to compute more than is new

    def take_turn(self) -> list[float]:
        """Return the milliseconds of one turn of each session, all sent at once."""

        def take(session_id: str, rng: random.Random) -> tuple[int, float]:
            new = rng.choices(_TOKENS, k=self._num_new)
            _, cached, ms = self._client.generate(new, self._num_output, session_id)
            return cached, ms

        results = list(self._pool.map(take, self._ids, self._rngs))
        # The last sampled token has no KV yet.
        in_place = max(self._history_len - 1, 0)
        self.num_not_in_place += sum(cached < in_place for cached, _ in results)
        self._history_len += self._num_new + self._num_output
        return [ms for _, ms in results]

    def close(self) -> None:
        for session_id in self._ids:
            self._client.post("/close_session", {"session_id": session_id})


def plot(source: Path, target: Path) -> None:
    """Draw the points of `measure`, a pair of lines for each label."""
    by_label: dict[str, list[Point]] = defaultdict(list)
    for line in source.read_text().splitlines():
        point = Point(**json.loads(line))
        by_label[point.label].append(point)
    figure = figure_class()(figsize=(6.4, 4.0), layout="tight")
    axes = figure.subplots()
    for color, (label, points) in zip(("C0", "C1", "C2", "C3"), by_label.items(), strict=False):
        lens = [point.history_len for point in points]
        axes.plot(
            lens, [p.session_ms for p in points], "o-", color=color, label=f"{label}: session"
        )
        axes.plot(
            lens, [p.resend_ms for p in points], "s--", color=color, label=f"{label}: sent whole"
        )
    axes.set(xscale="log", yscale="log", xlabel="tokens of history", ylabel="latency of a turn, ms")
    axes.set_xticks(lens, [f"{n:,}" for n in lens])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table, or plot earlier measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--label", default="server")
    parser.add_argument("--history-lens", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--num-turns", type=int, default=15)
    parser.add_argument("--num-sessions", type=int, default=0, help="measure growth, of so many")
    parser.add_argument("--num-new", type=int, default=16)
    parser.add_argument("--num-output", type=int, default=8)
    parser.add_argument("--output", type=Path, help="append a line of JSON for each length")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSONL", "SVG"))
    options = parser.parse_args(argv)
    if options.plot:
        plot(*options.plot)
        return
    client = Client(options.base_url)
    sizes = (options.num_turns, options.num_new, options.num_output)
    if options.num_sessions:
        print(measure_growth(client, options.num_sessions, *sizes))
        return
    print(HEADER)
    for history_len in map(int, options.history_lens.split(",")):
        point = measure(client, options.label, history_len, *sizes)
        print(point.line(), flush=True)
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(point._asdict()) + "\n")


if __name__ == "__main__":
    main()
