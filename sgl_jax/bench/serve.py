"""Load a running server and report throughput and latency: `sgl-jax bench serve`.

Flags and table match SGLang's `bench_serving` with its random-token data set; `--trace` replays
recorded traffic instead (docs/measurements/recorded_traffic.md). Requests go to the native route
(`--backend sglang`) or the OpenAI route (`--backend sglang-oai`) of any server with that route, so
that one program can measure two servers. The vocabulary size and the longest request are read from
the server.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from sgl_jax.bench.trace.reading import TraceError, read_trace
from sgl_jax.bench.trace.turns import turn_kinds
from sgl_jax.bench.traced_load import Chain, TracedPrompts, traced_chains

_FIRST_PLAIN_TOKEN = 300  # most vocabularies begin with bytes and special tokens
_LAST_SPECIAL_TOKENS = 16
# Routes with a server's limits, and the names of those limits in sgl_jax and in SGLang.
_FACT_ROUTES = ("/get_model_info", "/get_server_info")
_REQUEST_LIMITS = ("max_request_tokens", "context_length")


class LoadError(ValueError):
    """The server would refuse the requested load; the message names the flags to change."""


@dataclass(frozen=True)
class ServerFacts:
    """A server's limits on requests; None for a limit that its routes do not return."""

    vocab_size: int | None
    max_request_tokens: int | None  # prompt and output

    @classmethod
    def read(cls, url: str) -> "ServerFacts":
        """Read the limits from the server at `url`. Raises LoadError if none responds."""
        limits: dict[str, Any] = {}
        for route in _FACT_ROUTES:
            try:
                with urllib.request.urlopen(url + route, timeout=60) as response:
                    limits = json.load(response) | limits
            except urllib.error.HTTPError:
                continue  # a different kind of server, without that route
            except (OSError, ValueError) as error:
                raise LoadError(f"no server responds at {url}{route}: {error}") from error
        most = next((limits[name] for name in _REQUEST_LIMITS if limits.get(name)), None)
        return cls(limits.get("vocab_size"), most)


@dataclass
class RequestTimes:
    """One request as measured by the client; times in seconds from its start. `cached_tokens` are
    those that the server reports."""

    index: int = 0
    num_prompt_tokens: int = 0
    cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Load:
    """The requests of one run: request i sends `prompts[i]` for `output_lens[i]` tokens. Chains
    start at once, and of each, a request is sent after the answer to the one before. None begins
    after `duration_s`. `kinds` of turns are set for recorded agents."""

    url: str
    backend: str
    model: str
    prompts: Sequence[list[int]]
    output_lens: list[int]
    max_concurrency: int
    chains: list[Chain]
    duration_s: float = float("inf")
    kinds: list[str] | None = None


def make_load(args: argparse.Namespace, facts: ServerFacts) -> Load:
    """Return random prompts of the requested lengths, or those of a recording; equal seeds give
    equal prompts. Raises LoadError if the server would refuse a request."""
    if args.trace is not None:
        return _traced_load(args, facts)
    prompt_len = max(args.random_input_len, args.shared_prefix_len + 1)
    most = facts.max_request_tokens
    if most is not None and prompt_len + args.random_output_len > most:
        raise LoadError(
            f"prompts of {prompt_len} tokens and answers of {args.random_output_len} exceed the "
            f"{most} tokens that the server takes per request: choose a smaller "
            "--random-input-len, --shared-prefix-len or --random-output-len"
        )
    low, high = _plain_tokens(args, facts)
    rng = random.Random(args.seed)

    def length(most: int) -> int:
        return rng.randint(max(1, int(most * args.random_range_ratio)), most)

    prefix = [rng.randrange(low, high) for _ in range(args.shared_prefix_len)]
    prompts, output_lens = [], []
    for _ in range(args.num_prompts):
        rest = max(1, length(args.random_input_len) - len(prefix))
        prompts.append(prefix + [rng.randrange(low, high) for _ in range(rest)])
        output_lens.append(length(args.random_output_len))
    return Load(
        url=args.base_url,
        backend=args.backend,
        model=args.model,
        prompts=prompts,
        output_lens=output_lens,
        max_concurrency=args.max_concurrency or args.num_prompts,
        chains=[[(i / args.request_rate, i)] for i in range(args.num_prompts)],
    )


def _plain_tokens(args: argparse.Namespace, facts: ServerFacts) -> tuple[int, int]:
    """Return the range, without its end, of tokens that prompts have."""
    vocab_size = args.vocab_size or facts.vocab_size
    if vocab_size is None:
        raise LoadError("the server does not return its vocabulary size: give --vocab-size")
    if facts.vocab_size is not None and vocab_size > facts.vocab_size:
        raise LoadError(f"--vocab-size {vocab_size} is more than the server's {facts.vocab_size}")
    high = vocab_size - _LAST_SPECIAL_TOKENS
    return min(_FIRST_PLAIN_TOKEN, high // 2), high


def _traced_load(args: argparse.Namespace, facts: ServerFacts) -> Load:
    """Return the recorded requests, without those that the server would refuse."""
    try:
        recorded = read_trace(args.trace, args.num_prompts)
    except (OSError, TraceError) as error:
        raise LoadError(str(error)) from error
    most = facts.max_request_tokens or float("inf")
    trace = [each for each in recorded if each.input_len + each.output_len <= most]
    if not trace:
        raise LoadError(f"all requests of {args.trace} exceed the server's {most} tokens")
    if len(trace) < len(recorded):
        left_out = len(recorded) - len(trace)
        print(f"{left_out} requests of more than {most} tokens are left out", file=sys.stderr)
    return Load(
        url=args.base_url,
        backend=args.backend,
        model=args.model,
        prompts=TracedPrompts(trace, *_plain_tokens(args, facts)),
        output_lens=[request.output_len for request in trace],
        max_concurrency=args.max_concurrency or len(trace),
        chains=traced_chains(trace, args),
        duration_s=args.duration_s,
        kinds=turn_kinds(trace) if any(request.agent for request in trace) else None,
    )


def _body(load: Load, index: int) -> tuple[str, dict[str, Any]]:
    prompt, count = load.prompts[index], load.output_lens[index]
    if load.backend == "sglang":
        sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        return "/generate", {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    return "/v1/completions", {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def _cached_tokens(event: dict[str, Any], before: int) -> int:
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    meta = event.get("meta_info") or {}
    return int(meta.get("cached_tokens") or details.get("cached_tokens") or before)


def _tokens_so_far(backend: str, event: dict[str, Any], before: int) -> int:
    if backend == "sglang":
        return int(event["meta_info"]["completion_tokens"])
    usage = event.get("usage")
    if usage:
        return int(usage["completion_tokens"])
    return before + bool(event.get("choices"))


async def _send(session: aiohttp.ClientSession, load: Load, index: int) -> RequestTimes:
    path, body = _body(load, index)
    prompt = body["input_ids"] if load.backend == "sglang" else body["prompt"]
    times = RequestTimes(index, len(prompt))
    start = last = time.perf_counter()
    try:
        async with session.post(load.url + path, json=body) as response:
            if response.status != 200:
                times.error = f"{response.status}: {(await response.text())[:200]}"
                return times
            async for line in response.content:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    times.error = str(event["error"])[:200]
                    return times
                now = time.perf_counter()
                times.cached_tokens = _cached_tokens(event, times.cached_tokens)
                count = _tokens_so_far(load.backend, event, times.num_output_tokens)
                gained = count - times.num_output_tokens
                if gained <= 0:
                    continue
                if times.num_output_tokens == 0:
                    times.ttft_s = now - start
                else:
                    times.itl_s += [(now - last) / gained] * gained
                last, times.num_output_tokens = now, count
                times.output_ids = event.get("output_ids") or times.output_ids
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        times.error = repr(error)
    times.e2e_s = last - start
    return times


async def run(load: Load) -> tuple[list[RequestTimes], float]:
    """Send all requests; return an entry per sent request in the load's order, and the seconds from
    start to end."""
    permits = asyncio.Semaphore(load.max_concurrency)
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        start = time.perf_counter()

        async def send_chain(chain: Chain) -> list[RequestTimes]:
            answered = []
            for delay_s, index in chain:
                if time.perf_counter() + delay_s - start >= load.duration_s:
                    break
                await asyncio.sleep(delay_s)
                async with permits:
                    answered.append(await _send(session, load, index))
            return answered

        results = await asyncio.gather(*map(send_chain, load.chains))
        times = sorted((each for sent in results for each in sent), key=lambda each: each.index)
        return times, time.perf_counter() - start


def summarise(load: Load, results: Sequence[RequestTimes], wall_s: float) -> dict[str, float]:
    """Return the figures of the table by name. Latencies are in milliseconds."""
    done = [times for times in results if times.error is None]
    inputs = sum(times.num_prompt_tokens for times in done)
    outputs = sum(times.num_output_tokens for times in done)
    figures: dict[str, float] = {
        "successful_requests": len(done),
        "failed_requests": len(results) - len(done),
        "duration_s": wall_s,
        "total_input_tokens": inputs,
        "cached_input_tokens": sum(times.cached_tokens for times in done),
        "total_output_tokens": outputs,
        "request_throughput": len(done) / wall_s,
        "input_throughput": inputs / wall_s,
        "output_throughput": outputs / wall_s,
    }
    tpot = [
        (t.e2e_s - t.ttft_s) / (t.num_output_tokens - 1) for t in done if t.num_output_tokens > 1
    ]
    series = {
        "e2e": [times.e2e_s for times in done],
        "ttft": [times.ttft_s for times in done],
        "tpot": tpot,
        "itl": [gap for times in done for gap in times.itl_s],
    }
    for name, values in series.items():
        figures |= {f"{key}_{name}_ms": 1e3 * value for key, value in _spread(values).items()}
    for kind in dict.fromkeys(load.kinds or ()):
        turns = [times for times in done if load.kinds and load.kinds[times.index] == kind]
        if turns:
            tokens = sum(times.num_prompt_tokens for times in turns)
            figures |= {
                f"turns_{kind}": len(turns),
                f"hit_rate_{kind}": sum(times.cached_tokens for times in turns) / tokens,
                f"mean_ttft_s_{kind}": statistics.mean(times.ttft_s for times in turns),
            }
    return figures


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"mean": statistics.mean(ordered), "median": statistics.median(ordered), "p99": p99}


_TITLES = {
    "e2e": "End-to-End Latency",
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-Token Latency",
}


def format_table(figures: dict[str, float]) -> str:
    lines = [f"{' Serving Benchmark Result ':=^60}"]
    for name, value in figures.items():
        if not name.endswith("_ms"):
            lines.append(f"{name.replace('_', ' '):<45}{value:>15.2f}")
    for name, title in _TITLES.items():
        lines.append(f"{title:-^60}")
        for key in ("mean", "median", "p99"):
            value = figures.get(f"{key}_{name}_ms", float("nan"))
            lines.append(f"{f'{key} {name} (ms)':<45}{value:>15.2f}")
    return "\n".join([*lines, "=" * 60])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; flags have SGLang's names."""
    parser = argparse.ArgumentParser(prog="sgl-jax bench serve", description=__doc__)
    parser.add_argument("--backend", choices=("sglang", "sglang-oai"), default="sglang")
    parser.add_argument("--base-url", help="of the server; else --host and --port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--model", default="default", help="name for the OpenAI route")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--random-input-len", type=int, default=128)
    parser.add_argument("--random-output-len", type=int, default=64)
    parser.add_argument("--random-range-ratio", type=float, default=1.0, help="shortest / longest")
    parser.add_argument("--shared-prefix-len", type=int, default=0, help="tokens all prompts share")
    parser.add_argument("--vocab-size", type=int, help="token ids are below this; default: all")
    parser.add_argument("--request-rate", type=float, default=float("inf"))
    parser.add_argument("--max-concurrency", type=int, default=0, help="0: no bound")
    parser.add_argument(
        "--trace", type=Path, help="recorded traffic, of which --num-prompts are sent"
    )
    parser.add_argument("--speedup", type=float, default=1.0, help="of recorded times")
    parser.add_argument(
        "--closed-loop",
        action="store_true",
        help="recorded agents send a request the recorded pause after the last answer",
    )
    parser.add_argument(
        "--duration-s", type=float, default=float("inf"), help="send no request after this time"
    )
    parser.add_argument("--warmup-requests", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output-file", help="append the figures as a line of JSON")
    parser.add_argument("--output-details", action="store_true", help="and every request's")
    args = parser.parse_args(argv)
    args.base_url = args.base_url or f"http://{args.host}:{args.port}"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a request failed, 2 if the server would refuse the load."""
    args = parse_args(argv)
    try:
        load = make_load(args, ServerFacts.read(args.base_url))
    except LoadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.warmup_requests:
        rng = random.Random(-args.seed)
        warm = [rng.sample(prompt, len(prompt)) for prompt in load.prompts[: args.warmup_requests]]
        chains = [[(0.0, i)] for i in range(len(warm))]
        asyncio.run(run(replace(load, prompts=warm, chains=chains, duration_s=float("inf"))))
    results, wall_s = asyncio.run(run(load))
    figures = summarise(load, results, wall_s)
    print(format_table(figures))
    if args.output_file:
        line: dict[str, Any] = dict(figures)
        if args.output_details:
            line["requests"] = [asdict(times) for times in results]
        with open(args.output_file, "a") as file:
            file.write(json.dumps(line) + "\n")
    failures = sorted({times.error for times in results if times.error})
    for failure in failures[:5]:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0
