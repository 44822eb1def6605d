"""An engine that follows a script instead of a model: each output repeats the prompt.

It does what the frontend relies on of the real one (one finish per request, overshoot after a stop
string, replies), so everything above the engine can be tested without a device. Run as a program
it takes the place of `python -m sgl_jax.engine`.
"""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from sgl_jax.core.calls import WithReply
from sgl_jax.core.engine_messages import (
    EngineInfo,
    EngineMessage,
    FinishReason,
    OutputBatch,
    Reply,
    RequestOutput,
    TokenLogprobs,
)
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import (
    CALL_OF,
    AbortRequest,
    CancelCall,
    CloseSession,
    ContinueGeneration,
    DescribePage,
    FindPrefix,
    FlushCache,
    ForkSession,
    FrontMessage,
    GenerateRequest,
    GetState,
    ListSessions,
    MemoryMessage,
    OpenSession,
    PauseGeneration,
    ReadMemory,
    RollbackSession,
    SessionMessage,
    SetInternalState,
    Shutdown,
    StopRequest,
)
from sgl_jax.core.profile_messages import (
    DumpExpertRecord,
    StartExpertRecord,
    StartProfile,
    StopExpertRecord,
    StopProfile,
)
from sgl_jax.core.progress import Progress
from sgl_jax.core.sampling_params import choice_seed
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.token_values import TOKEN_VALUES, named_values
from sgl_jax.core.transfers import STORE_MISSES
from sgl_jax.core.weight_messages import UpdateWeightsFromDisk, UpdateWeightsFromTensor
from sgl_jax.engine.channels import Channel
from sgl_jax.engine.process import run_engine
from sgl_jax.engine.watchdog import Watchdog
from sgl_jax.grammar.compiler import GrammarCompiler
from sgl_jax.mem_cache.eviction.eviction_policy import EvictionPolicy
from sgl_jax.scheduler.hint_counts import HintCounts
from sgl_jax.text.tokenizer import Tokenizer
from tests.support.images import image_settings

CRASH_SEED = 666  # a request with this seed is a defect of the engine
SLOW_CRASH_SEED = 667  # likewise, and the process takes `SLOW_EXIT_S` to end
SLOW_EXIT_S = 4.0
SLOW_START_SEED = 668  # the server's own seed: it takes `SLOW_START_S` to start
SLOW_START_S = 4.0
MAX_SESSIONS = 8
FULL_SEED = 503  # and with this one, the queue is full, or if it is a turn's, all sessions are
SECOND_FULL_SEED = 502  # and with this one, it is for the second choice
TENANT_FULL_SEED = 429  # here the tenant's queue is full
LATE_SEED = 504  # this one takes too long, after `LATE_TOKENS`
LATE_TOKENS = 3
HISTORY = 100  # tokens of every session
DP_SIZE = 2
PAGE_SIZE = 4
MAX_RUNNING = 4  # what the frontend is told; the script runs all that comes
LOGPROB = -0.5
HIDDEN_SIZE = 4
NUM_LAYERS, TOP_K = 3, 2
EOS = 1
RANK_COUNTERS = {
    **dict.fromkeys(("prompt_tokens", "cached_tokens", "evicted_pages", "sessions_evicted"), 0),
    **dict.fromkeys(("requests_retracted", "requests_preempted"), 0),
    **dict.fromkeys(("retracted_input_tokens", "retracted_output_tokens"), 0),
    **dict.fromkeys(("requests_force_retracted", "host_failed_transfers"), 0),
    **dict.fromkeys(("host_copied_pages", "host_fetched_tokens"), 0),
    **dict.fromkeys(("image_encodings", "image_cache_hits"), 0),
    **HintCounts().counters(),
    **EvictionPolicy().retained_pages,
    **dict.fromkeys(("store_put_blocks", "store_loaded_tokens"), 0),
    **{f"store_misses_{why}": 0 for why in STORE_MISSES},
}
CHANGES = (PauseGeneration, ContinueGeneration, UpdateWeightsFromDisk, SetInternalState)


def scripted_hidden(request: GenerateRequest) -> bytes:
    """The last and the first token, and the number of them, from which no two lengths are equal."""
    ids = request.input_ids
    return np.array([ids[-1], ids[0], len(ids), 1], "<f4").tobytes()


@dataclass
class Running:
    request: GenerateRequest
    num_output_tokens: int = 0


def scripted_values(running: Running) -> dict[str, bytes]:
    """Each token's position, as often as it has numbers; of the whole prompt first."""
    start = running.request.token_values_start
    end = len(running.request.input_ids) + running.num_output_tokens - 1
    positions = np.arange(start if running.num_output_tokens == 1 else end - 1, end, dtype="<i2")
    counts = {"routed_experts": NUM_LAYERS * TOP_K, "hidden_states": HIDDEN_SIZE}
    return {
        name: np.repeat(positions, counts[name]).astype(TOKEN_VALUES[name]).tobytes()
        for name in named_values(running.request.token_values)
    }


@dataclass
class ScriptedEngine:
    """Set `step_s` to make steps take time; look at `seen` for what the frontend sent."""

    step_s: float = 0.0
    max_request_tokens: int = 256
    vocab_size: int = 512
    tokenizer_folder: str = "no tokenizer"  # by which grammars are compiled
    num_missing: int = 0  # tensors after each message that brings some
    refuses_weights: bool = False  # such messages
    seen: list[FrontMessage] = field(default_factory=list)
    running: dict[str, Running] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    stopped: bool = False  # set from outside
    is_paused: bool = False
    model_path: str = "scripted"
    settings: dict[str, Any] = field(default_factory=dict)
    scheduler: Any = None  # whose memory is read
    takes_images: bool = False
    _may_go_on: threading.Event = field(default_factory=threading.Event)
    _stands_still: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._may_go_on.set()

    def stand_still(self) -> None:
        """From another thread: hear nothing until `go_on`, as in a long step."""
        self._stands_still.clear()
        self._may_go_on.clear()
        assert self._stands_still.wait(10), "the engine's loop has ended"

    def go_on(self) -> None:
        self._may_go_on.set()

    @property
    def info(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab_size,
            "max_context_len": 1024,
            "max_request_tokens": self.max_request_tokens,
            "dp_size": DP_SIZE,
            "page_size": PAGE_SIZE,
            "num_layers": NUM_LAYERS,
            "experts_per_token": TOP_K,
            "max_running_requests": MAX_RUNNING,
            "hidden_size": HIDDEN_SIZE,
            "eos_token_ids": [EOS],
            "is_paused": self.is_paused,
            "model_path": self.model_path,
            "settings": self.settings,
            **self._images,
        }

    @property
    def _images(self) -> dict[str, Any]:
        limits = {"image_slots": 0, "max_images": 5, "max_image_tokens": 64, "image_token_side": 32}
        if not self.takes_images:
            return {**dict.fromkeys(limits, 0), "images": None}
        settings = image_settings(Tokenizer.load(self.tokenizer_folder))
        return {**limits, "images": msgspec.to_builtins(settings)}

    def run(self, channel: Channel, *, after_turn: object = None) -> None:
        with Watchdog(channel.send, Progress()):
            self.loop(channel)

    def loop(self, channel: Channel) -> None:
        while not self.stopped:
            if not self._may_go_on.is_set():
                self._stands_still.set()
                self._may_go_on.wait(0.05)  # or it is stopped
                continue
            messages = channel.poll(0 if self.running and not self.is_paused else 0.05)
            cancelled = {each.call for each in messages if isinstance(each, CancelCall)}
            for message in messages:
                self.seen.append(message)
                if isinstance(message, WithReply) and message.rid in cancelled:
                    channel.send(Reply(rid=message.rid, ok=False, message="cancelled"))
                    continue
                if isinstance(message, Shutdown):
                    return
                answer = self.answer(message)
                if isinstance(message, CHANGES):
                    channel.send(EngineInfo(info=self.info))
                if answer is not None:
                    channel.send(answer)
            if self.running and not self.is_paused:
                channel.send(self.step())
                time.sleep(self.step_s)

    def answer(self, message: FrontMessage) -> EngineMessage | None:
        match message:
            case GenerateRequest():
                return self.admit(message)
            case AbortRequest():
                rids = list(self.running) if message.abort_all else [message.rid]
                ended = [self.running.pop(rid) for rid in rids if rid in self.running]
                status_code = message.status_code
                finish = FinishReason("abort", message=message.message, status_code=status_code)
                return OutputBatch(
                    outputs=[RequestOutput(r.request.rid, [], 0, 0, finish) for r in ended]
                )
            case StopRequest():
                self.running.pop(message.rid, None)
                return None
            case FlushCache():
                busy = bool(self.running)
                if busy:
                    return Reply(rid=message.rid, ok=False, message="busy", data={"code": "busy"})
                return Reply(rid=message.rid, ok=True, data={"flushed": True})
            case ReadMemory() | DescribePage() | FindPrefix():
                return self.read_memory(message)
            case GetState():
                return Reply(rid=message.rid, ok=True, data=self.state())
            case (
                OpenSession() | CloseSession() | RollbackSession() | ForkSession() | ListSessions()
            ):
                return self.ask_session(message)
            case PauseGeneration() | ContinueGeneration():
                self.is_paused = isinstance(message, PauseGeneration)
                data = {"is_paused": self.is_paused, "num_running": 0, "num_waiting": 0}
                return Reply(rid=message.rid, ok=True, data=data)
            case SetInternalState():
                self.settings = self.settings | message.server_args
                data = {"updated": True, "server_args": message.server_args}
                return Reply(rid=message.rid, ok=True, data=data)
            case UpdateWeightsFromTensor() if self.refuses_weights:
                return Reply(rid=message.rid, ok=False, message="a tensor is unknown")
            case UpdateWeightsFromTensor():
                data = {"success": True, "message": "taken", "num_missing": self.num_missing}
                return Reply(rid=message.rid, ok=True, data=data)
            case UpdateWeightsFromDisk():
                self.model_path = message.model_path
                data = {"success": True, "message": "loaded", "num_paused_requests": 0}
                return Reply(rid=message.rid, ok=True, data=data)
            case StartProfile():
                return Reply(rid=message.rid, ok=True, data={"output_dir": message.output_dir})
            case StartExpertRecord() | StopExpertRecord():
                return Reply(rid=message.rid, ok=True)
            case DumpExpertRecord():
                return Reply(rid=message.rid, ok=True, data={"logical_count": [[3, 1], [0, 4]]})
            case StopProfile():
                return Reply(rid=message.rid, ok=True, data={"output_dir": "somewhere"})
        return None

    def read_memory(self, message: MemoryMessage) -> Reply:
        """Of the real scheduler that the test has put into `scheduler`."""
        # Here, since most scripts start without them.
        from sgl_jax.core.engine_messages import answer, refusal
        from sgl_jax.memory_view.reader import MemoryReader

        try:
            read = getattr(MemoryReader(self.scheduler), CALL_OF[type(message)].handler)
            return answer(message, read(message))
        except InvalidRequestError as error:
            return refusal(message, str(error), param=error.param)

    def check_grammar(self, request: GenerateRequest) -> FinishReason | None:
        """The end of a request whose grammar cannot be compiled."""
        grammar = request.sampling.grammar
        try:
            if grammar is not None:
                GrammarCompiler(self.tokenizer_folder, self.vocab_size, (EOS,)).compile(grammar)
        except InvalidRequestError as error:
            return FinishReason("abort", message=str(error), status_code=400, param=error.param)
        return None

    def ask_session(self, message: SessionMessage) -> Reply:
        """Ids are known or not; every session has a turn and `HISTORY` tokens."""
        data: dict[str, Any] = {}
        match message:
            case ListSessions():
                data = {"sessions": [described_session(name) for name in sorted(self.sessions)]}
            case OpenSession() if len(self.sessions) >= MAX_SESSIONS:
                full = {"status_code": 503, "code": "too_many_sessions"}
                return Reply(rid=message.rid, ok=False, message="too many", data=full)
            case OpenSession(session_id=name) if name not in self.sessions:
                self.sessions.add(name)
                data = {"session_id": name}
            case CloseSession(session_id=name) if name in self.sessions:
                self.sessions.remove(name)
            case RollbackSession(session_id=name, num_turns=num_turns) if name in self.sessions:
                data = {"num_turns": num_turns, "num_tokens": HISTORY}
            case ForkSession(session_id=name, new_session_id=other) if name in self.sessions:
                self.sessions.add(other)
                data = {"session_id": other, "num_tokens": HISTORY}
            case _:
                refusal = {"param": "session_id"}
                return Reply(rid=message.rid, ok=False, message="the script refuses", data=refusal)
        return Reply(rid=message.rid, ok=True, data=data)

    def admit(self, request: GenerateRequest) -> EngineMessage | None:
        seed = request.sampling.seed
        if seed == CRASH_SEED:
            raise RuntimeError("the script says to crash")
        if seed == SLOW_CRASH_SEED:
            # The interpreter waits for threads that are no daemons, after the sockets are closed.
            threading.Thread(target=time.sleep, args=(SLOW_EXIT_S,)).start()
            raise RuntimeError("the script says to crash and to linger")
        if seed in (FULL_SEED, choice_seed(SECOND_FULL_SEED, 1)):
            finish = FinishReason(type="abort", message="the queue is full", status_code=503)
            if request.session is not None:
                finish = msgspec.structs.replace(finish, code="too_many_sessions")
            return OutputBatch(outputs=[RequestOutput(request.rid, [], 0, 0, finish)])
        if seed == TENANT_FULL_SEED:
            finish = FinishReason(
                type="abort",
                message="the tenant's queue is full",
                status_code=429,
                code="tenant_queue_full",
            )
            return OutputBatch(outputs=[RequestOutput(request.rid, [], 0, 0, finish)])
        if request.session is not None and request.session.id not in self.sessions:
            text = f"there is no such session: {request.session.id!r}"
            finish = FinishReason(type="abort", message=text, status_code=400)
            return OutputBatch(outputs=[RequestOutput(request.rid, [], 0, 0, finish)])
        refusal = self.check_grammar(request)
        if refusal is not None:
            return OutputBatch(outputs=[RequestOutput(request.rid, [], 0, 0, refusal)])
        self.running[request.rid] = Running(request)
        return None

    def step(self) -> OutputBatch:
        outputs: list[RequestOutput] = []
        rids: list[str] = []
        tokens: list[int] = []
        for rid, running in list(self.running.items()):
            request = running.request
            token = request.input_ids[running.num_output_tokens % len(request.input_ids)]
            running.num_output_tokens += 1
            finish = self.finish(running, token)
            if finish is not None:
                del self.running[rid]
            reports = request.return_logprob or request.token_values
            if finish is None and running.num_output_tokens > 1 and not reports:
                rids.append(rid)
                tokens.append(token)
                continue
            first = running.num_output_tokens == 1
            outputs.append(
                RequestOutput(
                    rid,
                    [token],
                    cached_tokens=len(request.input_ids) // 2,
                    dp_rank=request.dp_rank or 0,
                    finish=finish,
                    logprobs=[self.logprobs(request, token)] if request.return_logprob else None,
                    prompt_logprobs=self.prompt_logprobs(request) if first else None,
                    prompt_tokens=self.prompt_tokens(request) if first else None,
                    hidden=scripted_hidden(request) if request.return_hidden else None,
                    token_values=scripted_values(running),
                )
            )
        return OutputBatch(outputs, [rids], np.array(tokens, "<i4").tobytes())

    def finish(self, running: Running, token: int) -> FinishReason | None:
        sampling = running.request.sampling
        if sampling.seed == LATE_SEED and running.num_output_tokens == LATE_TOKENS:
            return FinishReason(type="abort", message="it took too long", status_code=504)
        ends = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,)))
        if token in ends and running.num_output_tokens >= sampling.min_new_tokens:
            return FinishReason(type="stop", matched=token)
        if running.num_output_tokens == sampling.max_new_tokens:
            return FinishReason(type="length")
        return None

    def logprobs(self, request: GenerateRequest, token: int) -> TokenLogprobs:
        others = [(token + i) % self.vocab_size for i in range(request.top_logprobs_num)]
        tops = [LOGPROB - i for i in range(len(others))]
        named = [LOGPROB - token_id for token_id in request.token_ids_logprob]
        return TokenLogprobs(token, LOGPROB, others, tops, named)

    def prompt_logprobs(self, request: GenerateRequest) -> list[TokenLogprobs] | None:
        if request.logprob_start_len < 0:
            return None
        wanted = request.input_ids[request.logprob_start_len :]
        entries = [self.logprobs(request, token) for token in wanted]
        if request.logprob_start_len == 0:
            entries[0] = TokenLogprobs(wanted[0], None, [], [])
        return entries

    def prompt_tokens(self, request: GenerateRequest) -> int | None:
        return None if request.session is None else HISTORY + len(request.input_ids)

    def state(self) -> dict[str, Any]:
        pool = {
            "total_pages": 10,
            "free_pages": 6,
            "leased_pages": 2,
            "cached_pages": 1,
            "protected_pages": 0,
            "reserved_pages": 1,
            "session_held_pages": 0,
        }
        pools = [{"kind": "pages", "sliding_windows": [None], "own_slots": 0, **pool}]
        rank = pool | {"page_size": 16, "pools": pools, "session_pages": 0}
        rank |= {"free_rows": 7, "total_rows": 8, "session_rows": 1, "num_waiting": 0}
        rank |= {"forecast_pages": 1, "most_growth_pages": 4, "counters": dict(RANK_COUNTERS)}
        rank |= {"host_pools": [], "host_copies_waiting": 0}
        ranks = [{"dp_rank": r, "num_running": len(self.running), **rank} for r in range(DP_SIZE)]
        counters = {"steps": 1, "retracted": 0}
        return {
            "ranks": ranks,
            "waiting_for": {"rows": 0, "pages": 3},
            "num_sessions": len(self.sessions),
            "counters": counters,
            "tenants": self.tenants(),
        }

    def tenants(self) -> dict[str, dict[str, int]]:
        """Figures of each tenant: requests and their prompts count, and 7 tokens for each."""
        seen = [m for m in self.seen if isinstance(m, GenerateRequest) and m.tenant is not None]
        return {
            name: {
                "num_queued": 1,
                "num_running": 2,
                "prompt_tokens": sum(len(request.input_ids) for request in own),
                "cached_tokens": 3 * len(own),
                "generated_tokens": 7 * len(own),
            }
            for name in dict.fromkeys(request.tenant.name for request in seen if request.tenant)
            for own in ([r for r in seen if r.tenant is not None and r.tenant.name == name],)
        }


def described_session(name: str) -> dict[str, Any]:
    return {
        "session_id": name,
        "streaming": True,
        "num_turns": 1,
        "num_tokens": HISTORY,
        "num_running": 0,
        "is_closing": False,
        "idle_s": 1.5,
        "timeout_s": None,
        "dp_rank": 0,
        "cached_tokens": HISTORY - 1,
    }


def build(args: ServerArgs, progress: Progress) -> ScriptedEngine:
    """The seed means something else here: the step time in milliseconds."""
    if args.random_seed == CRASH_SEED:
        raise RuntimeError("the script says not to start")
    print("scripted engine: warming up", file=sys.stderr, flush=True)
    if args.random_seed == SLOW_START_SEED:
        with progress.phase("loading", 20, "bytes") as phase:
            phase.advance(5)
            time.sleep(SLOW_START_S)
        return ScriptedEngine()
    tokens = args.context_length or ScriptedEngine.max_request_tokens
    return ScriptedEngine(
        step_s=args.random_seed / 1000,
        max_request_tokens=tokens,
        tokenizer_folder=args.tokenizer_folder,
        takes_images=args.enable_multimodal,
    )


class DirectClient:
    """A front's channel without a process: messages collect until `pump` runs the engine."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.sent: list[FrontMessage] = []
        self.unread: list[FrontMessage] = []

    def send(self, message: FrontMessage) -> None:
        self.sent.append(message)
        self.unread.append(message)

    def pump(self, handle: Callable[[EngineMessage], None], steps: int = 1) -> None:
        for _ in range(steps):
            unread, self.unread = self.unread, []
            for message in unread:
                answer = self.engine.answer(message)
                if answer is not None:
                    handle(answer)
            handle(self.engine.step())


if __name__ == "__main__":
    sys.exit(run_engine(build))  # type: ignore[arg-type]
