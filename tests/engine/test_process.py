"""The engine process starts, speaks, and never dies unnoticed or lives on alone."""

import asyncio
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sgl_jax.core.engine_messages import (
    EngineFailed,
    EngineInfo,
    EngineMessage,
    Heartbeat,
)
from sgl_jax.core.messages import Shutdown
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.channels import EngineClient
from sgl_jax.engine.process import ENGINE_COMMAND, EngineProcess, ExitReport
from tests.engine.scripted_engine import CRASH_SEED

Reports = queue.Queue[ExitReport]
GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3"
SCRIPTED = (sys.executable, "-m", "tests.engine.scripted_engine")
STALLED = (sys.executable, "-m", "tests.engine.stalled_compiler")


@contextmanager
def running(
    seed: int = 0,
    command: Sequence[str] = SCRIPTED,
    model_path: str = "none",
    warmup: str = "none",
) -> Iterator[tuple[EngineProcess, EngineClient, Reports]]:
    client = EngineClient()
    reports: Reports = queue.Queue()
    args = ServerArgs(model_path=model_path, random_seed=seed, max_total_tokens=1024, warmup=warmup)
    process = EngineProcess(args, client.engine_end, reports.put, command)
    try:
        yield process, client, reports
    finally:
        process.kill()
        client.close()


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_the_report_has_been_made_once_the_process_is_stopped(ends_by_itself: bool) -> None:
    # Else it is made while the parent ends, by a thread whose callback finds a closed loop.
    for _ in range(5):
        command = ("sleep", "0" if ends_by_itself else "60")
        with running(command=command) as (process, _, reports):
            if ends_by_itself:
                while process.is_alive:
                    time.sleep(0.001)
            process.kill()
            assert not reports.empty()


async def first_message(client: EngineClient) -> EngineMessage:
    """The first that is no heartbeat: those come by a socket of their own, in no order with it."""
    arrived: asyncio.Queue[EngineMessage] = asyncio.Queue()
    client.listen(arrived.put_nowait, lambda error: pytest.fail(str(error)))
    message = await asyncio.wait_for(arrived.get(), 30)
    while isinstance(message, Heartbeat):
        message = await asyncio.wait_for(arrived.get(), 30)
    return message


def test_it_says_it_is_ready_and_ends_when_told() -> None:
    with running() as (process, client, reports):
        ready = asyncio.run(first_message(client))
        assert isinstance(ready, EngineInfo)
        assert ready.info["vocab_size"] == 512
        client.send(Shutdown())
        process.stop(timeout_s=20)
        assert "exit code 0" in reports.get(timeout=5).how
        assert not process.is_alive


@pytest.mark.long
def test_the_log_of_the_real_engine_reaches_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with running(command=ENGINE_COMMAND, model_path=str(GOLDEN)) as (process, client, _):
        assert isinstance(asyncio.run(first_message(client)), EngineInfo)
        client.send(Shutdown())
        process.stop(timeout_s=20)
    lines = capfd.readouterr().err.splitlines()
    assert sum("settings: " in line and "device=cpu" in line for line in lines) == 1
    assert sum("--max-total-tokens 1024" in line for line in lines) == 1
    assert all(re.search(" (INFO|WARNING) sgl_jax[.]", line) for line in lines), lines


@pytest.mark.long
def test_it_ends_at_once_though_a_program_is_being_compiled() -> None:
    with running(command=STALLED, model_path=str(GOLDEN), warmup="plain") as (process, client, _):
        assert isinstance(asyncio.run(first_message(client)), EngineInfo)
        client.send(Shutdown())
        process.stop(timeout_s=20)
        assert process._process.returncode == 0


def test_a_failure_to_start_names_its_reason() -> None:
    with running(CRASH_SEED) as (_, client, reports):
        failed = asyncio.run(first_message(client))
        assert failed == EngineFailed(message="RuntimeError: the script says not to start")
        report = reports.get(timeout=20)
        assert report.how == "the engine process ended with exit code 1"
        assert report.last_line == "RuntimeError: the script says not to start"


def test_a_kill_is_noticed_at_once() -> None:
    with running() as (process, client, reports):
        asyncio.run(first_message(client))
        os.kill(process.pid, signal.SIGKILL)
        assert "killed by signal 9" in reports.get(timeout=5).how


def test_one_that_does_not_end_is_killed() -> None:
    with running() as (process, client, reports):
        asyncio.run(first_message(client))
        process.stop(timeout_s=0.1)
        assert "killed" in reports.get(timeout=5).how


def test_it_does_not_outlive_its_parent() -> None:
    parent = textwrap.dedent(
        f"""
        import time
        from sgl_jax.core.server_args import ServerArgs
        from sgl_jax.engine.process import EngineProcess
        from sgl_jax.engine.channels import EngineClient
        args = ServerArgs(model_path="none")
        process = EngineProcess(args, EngineClient().engine_end, print, {SCRIPTED!r})
        print(process.pid, flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None
        child = psutil.Process(int(p.stdout.readline()))
        time.sleep(1.0)
        p.kill()
        child.wait(timeout=10)
