"""How far a reader must follow a chat completion, and one step of its decoding, counted.

The request: `STATIONS` lists, in running order, the functions and types through which a body goes
from its route to the channel of the engine, and for each the one before it that leads there: mostly
the last, or one to which the last has returned its value. From station to station the line is the
shortest chain of calls through functions and types of their two files, by the syntax tree; all
names on it count. A type stands for all of its methods, whoever calls them: so the response that
enters a `StreamGroup` when the HTTP server runs it, and takes its answers, is not on the line.
Helpers beside the line, which take nothing further along, do not count.

The step: steps of decoding rows, in which no request starts or ends, run under a profiler that
notes every function of the package that is entered, each once. Comprehensions, lambdas and the
constructors that Python writes do not count, nor does the heartbeat, which is of no step.
"""

import ast
import asyncio
import sys
import threading
import time
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import sgl_jax
from sgl_jax.bench.trace import fake_executor
from sgl_jax.core.messages import Shutdown
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.channels import SocketChannel
from sgl_jax.engine.front import health
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.scheduler.events import PlanStep, ResultRead, TakeOutputs
from sgl_jax.scheduler.scheduler import Scheduler
from sgl_jax.text.tokenizer import Tokenizer
from tests.scheduler.driver import generate, make_sizes
from tests.server.conftest import serving, text_workers

# The ceilings may only fall.
MOST_ON_THE_LINE = 7
MOST_OF_A_PLANNED_STEP = 32
MOST_OF_A_WHOLE_STEP = 75

# Each station, and the one that leads there; the first is a route.
STATIONS = {
    "server.apis.chat:chat_completions": None,
    "server.chat:answer_chat": "server.apis.chat:chat_completions",
    "server.requests:prompt_requests": "server.chat:answer_chat",
    "engine.front.request_checks:RequestChecks.prepare": "server.requests:prompt_requests",
    "server.answer_stream:StreamGroup": "server.chat:answer_chat",
    "engine.front.frontend:Frontend.submit": "server.answer_stream:StreamGroup",
    "engine.channels:_Messages.send": "engine.front.frontend:Frontend.submit",
}
# The frontend gets the channel's `send` as an argument.
CALLED = {"engine.channels:_Messages.send": "_send"}

ROOT = Path(sgl_jax.__file__).parent
DEMO = Path(__file__).parents[2] / "models" / "demo"
BESIDE_THE_STEP = {Path(fake_executor.__file__), Path(health.__file__)}
NUM_ROWS = 4
NUM_STEPS = 32  # a row of the demonstration model begins two pages in them


def definitions(file: str) -> dict[str, ast.AST]:
    """The functions, types and methods of a file by their names within it."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse((ROOT / f"{file.replace('.', '/')}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": method for method in methods}
    return found


def called_names(node: ast.AST) -> set[str]:
    """Last parts of the names that are called in a function or type."""
    functions = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    attributes = {node.attr for node in functions if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in functions if isinstance(node, ast.Name)}


def chain(start: str, end: str) -> list[str]:
    """The fewest names from one station to another: those between them, and the other."""
    files = [start.partition(":")[0], end.partition(":")[0]]
    nodes = {f"{file}:{name}": node for file in files for name, node in definitions(file).items()}
    assert {start, end} <= set(nodes)
    called = CALLED.get(end, end.rpartition(":")[2].rpartition(".")[2])
    chains = [[start]]
    for names in chains:
        next_names = called_names(nodes[names[-1]])
        if called in next_names:
            return [*names[1:], end]
        seen = {name for each in chains for name in each}
        ways = [name for name in nodes if name not in seen and name.partition(":")[2] in next_names]
        chains.extend([*names, name] for name in ways)
    raise AssertionError(f"nothing leads from {start} to {end}")


def main_line() -> list[str]:
    """All names of the line in running order."""
    line: list[str] = []
    for station, before in STATIONS.items():
        assert before is None or before in line, f"{before} is not before {station}"
        line += [station] if before is None else chain(before, station)
    return line


def test_a_body_reaches_the_channel_by_few_names() -> None:
    line = main_line()
    assert len(line) <= MOST_ON_THE_LINE, "\n".join(line)


def test_the_line_begins_at_the_route() -> None:
    file, _, name = next(iter(STATIONS)).partition(":")
    handler = definitions(file)[name]
    assert isinstance(handler, ast.AsyncFunctionDef)
    assert "/chat/completions" in ast.unparse(handler.decorator_list[0])


def test_the_line_returns_to_no_file_that_it_has_left() -> None:
    files = [file for file, _ in groupby(name.partition(":")[0] for name in main_line())]
    assert len(files) == len(set(files)), files


class Entered:
    """The functions of the package that profiled threads enter."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        """The profiler of a thread."""
        if event == "call":
            self.codes.add(frame.f_code)

    def names(self) -> list[str]:
        """File and name of each, in order."""
        places = [(Path(code.co_filename), code) for code in self.codes]
        return sorted(
            f"{path.relative_to(ROOT)} {code.co_qualname}"
            for path, code in places
            if path.is_relative_to(ROOT) and not code.co_name.startswith("<")
            if path not in BESIDE_THE_STEP
        )

    def check(self, most: int) -> None:
        names = self.names()
        assert len(names) <= most, "\n".join([f"{len(names)} functions:", *names])


def test_a_planned_step_enters_few_functions() -> None:
    sizes = make_sizes(page_size=16, num_pages=100, max_chunk_tokens=64)
    scheduler, executor = Scheduler(sizes, SchedulerArgs()), fake_executor.FakeExecutor(sizes)
    for i in range(NUM_ROWS):
        scheduler.handle(generate(f"r{i}", [3, 4 + i], 200))

    def run_steps(num_steps: int) -> None:
        for _ in range(num_steps):
            plan = scheduler.handle(PlanStep())
            results = executor.result(executor.launch(plan))
            scheduler.handle(ResultRead(plan.step_id, results))
            scheduler.handle(TakeOutputs())

    run_steps(8)
    entered = Entered()
    sys.setprofile(entered.note)
    try:
        run_steps(NUM_STEPS)
    finally:
        sys.setprofile(None)
    assert scheduler.num_running == NUM_ROWS
    entered.check(MOST_OF_A_PLANNED_STEP)


class ProfiledEngine:
    """A real engine on the demonstration model, in the place of the scripted one."""

    def __init__(self, args: ServerArgs) -> None:
        self.core = EngineCore(args)
        self.info = self.core.info
        self.entered = Entered()
        self.is_profiled = threading.Event()
        self.stopped = False

    def run(self, channel: SocketChannel) -> None:
        """Serve until `stopped`; profiled from one turn's end to another's."""

        def after_turn(is_resting: bool) -> None:
            sys.setprofile(None)
            time.sleep(0.005)  # the streams keep up, so that none ends while it is profiled
            sys.setprofile(self.entered.note if self.is_profiled.is_set() else None)
            if self.stopped:
                self.core.shut_down(Shutdown())

        self.core.run(channel, after_turn=after_turn)


class StreamClient:
    """Streams of chats, taken from the application itself; all profiled while all decode."""

    def __init__(self, app: Any, engine: ProfiledEngine) -> None:
        self._app = app
        self._engine = engine
        self._num_events = [0] * NUM_ROWS
        self.text = b""

    async def chat(self, index: int) -> None:
        """One stream, from its request to its end."""
        body = (
            b'{"model": "demo", "messages": [{"role": "user", "content": "Hello %d"}], '
            b'"stream": true, "max_tokens": 150, "ignore_eos": true}' % index
        )
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: dict[str, Any]) -> None:
            self.text += message.get("body", b"")
            self._num_events[index] += 1
            if min(self._num_events) > 8 and not self._engine.entered.codes:
                self._engine.is_profiled.set()
                sys.setprofile(self._engine.entered.note)
            if max(self._num_events) > 80:
                self._engine.is_profiled.clear()
                sys.setprofile(None)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
        }
        await self._app(scope, receive, send)


async def answers(engine: ProfiledEngine) -> bytes:
    """All bytes of the streams that decode side by side."""
    async with serving(DEMO, Tokenizer.load(str(DEMO)), engine=engine) as rig:
        client = StreamClient(rig.app, engine)
        await asyncio.gather(*(client.chat(index) for index in range(NUM_ROWS)))
    return client.text


def test_a_step_enters_few_functions_from_the_loop_to_the_bytes_of_the_answers() -> None:
    settings: dict[str, Any] = {"context_length": 256, "max_running_requests": NUM_ROWS}
    # A line of the log is not written in each step, and may fall between the profiled ones or not.
    settings["decode_log_interval"] = 0
    # Nor does a slice of the walk over the memory belong to a step.
    settings["check_memory"] = "idle"
    args = ServerArgs(model_path=str(DEMO), device="cpu", warmup="none", **settings)
    engine = ProfiledEngine(args)
    try:
        text = asyncio.run(answers(engine))
    finally:
        sys.setprofile(None)
        text_workers(DEMO).close()
    assert text.count(b'"finish_reason":"length"') == NUM_ROWS
    engine.entered.check(MOST_OF_A_WHOLE_STEP)
