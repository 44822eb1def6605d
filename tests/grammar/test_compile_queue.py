"""Turns, shares and ends of the grammars that wait to be compiled; the compiler is a script."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import MAX_GRAMMAR_CHARS, Grammar
from sgl_jax.grammar import compile_queue
from sgl_jax.grammar.compile_queue import CompileQueue, Job
from tests.support.tokenizers import byte_level, save
from tests.support.waiting import until


class Panic(BaseException):
    """As a panic of llguidance arrives in Python."""


class Compiler:
    """Compiles one grammar at each `go`; `compiled` lists the texts in order."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.wanted: set[str] = set()
        self.error: BaseException | None = None
        self._may_go = threading.Semaphore(0)
        self._has_begun = threading.Semaphore(0)
        self.queue = CompileQueue(self.compile, self.wanted.__contains__, max_queued=8)

    def compile(self, grammar: Grammar) -> Any:
        self._has_begun.release()
        assert self._may_go.acquire(timeout=60)
        self.compiled.append(grammar.text)
        if self.error is not None:
            raise self.error
        return f"matcher of {grammar.text}"

    def add(self, text: str, tenant: str = "", rid: str = "") -> bool:
        rid = rid or f"{text} of {tenant}"
        self.wanted.add(rid)
        return self.queue.add(Grammar("regex", text), rid, tenant)

    def begins(self) -> None:
        assert self._has_begun.acquire(timeout=60)

    def go(self, count: int = 1) -> None:
        self._may_go.release(count)

    def take(self, count: int) -> list[Job]:
        taken: list[Job] = []

        def is_whole() -> bool:
            taken.extend(self.queue.take())
            return len(taken) >= count

        until(is_whole, f"{count} jobs end")
        return taken


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.queue.close()
    compiler.go(100)


def test_a_flood_delays_the_grammar_of_another_tenant_by_one_compilation(
    compiler: Compiler,
) -> None:
    for text in "abcd":
        assert compiler.add(text, "flood")
    compiler.begins()
    assert compiler.add("x", "other")
    assert compiler.add("y", "other")
    compiler.go(6)
    compiler.take(6)
    assert compiler.compiled == ["a", "x", "b", "y", "c", "d"]


def test_a_grammar_that_a_flood_has_queued_comes_in_the_turn_of_each_who_waits(
    compiler: Compiler,
) -> None:
    for text in "abcd":
        compiler.add(text, "flood")
    compiler.begins()
    compiler.add("d", "other")
    compiler.go(4)
    jobs = compiler.take(4)
    assert compiler.compiled == ["a", "d", "b", "c"]
    (job,) = (job for job in jobs if job.grammar.text == "d")
    assert job.requests == [("d of flood", "flood"), ("d of other", "other")]


def test_nothing_is_compiled_for_clients_that_have_left(compiler: Compiler) -> None:
    for text in "abc":
        compiler.add(text)
    compiler.begins()
    compiler.wanted -= {"a of ", "b of "}
    compiler.go(2)
    jobs = compiler.take(2)
    assert compiler.compiled == ["a", "c"]
    assert [job.grammar.text for job in jobs] == ["a", "c"]
    until(lambda: not compiler.queue.take() and not len(compiler.queue), "none is left")


def test_a_dropped_grammar_that_is_wanted_again_is_compiled(compiler: Compiler) -> None:
    compiler.add("a")
    compiler.begins()
    compiler.add("b")
    compiler.wanted.clear()
    compiler.go()
    until(lambda: len(compiler.queue.ended) == 2, "b is dropped")
    compiler.add("b", rid="new")
    assert [job.grammar.text for job in compiler.queue.take()] == ["a"]
    compiler.go()
    (job,) = compiler.take(1)
    assert (job.matcher, job.requests) == ("matcher of b", [("new", "")])  # type: ignore[comparison-overlap]


def test_no_tenant_can_take_all_places(compiler: Compiler) -> None:
    assert [compiler.add(text, "flood") for text in "abcdef"] == [True] * 4 + [False] * 2
    assert [compiler.add(text, "other") for text in "uvw"] == [True] * 2 + [False]
    assert compiler.add("x", "third")
    compiler.go(100)
    compiler.take(7)
    assert not len(compiler.queue)
    assert compiler.queue._num_queued == {}
    assert compiler.add("z", "flood")


def test_requests_without_a_tenant_share_all_places(compiler: Compiler) -> None:
    assert [compiler.add(text) for text in "abcdefghi"] == [True] * 8 + [False]
    assert compiler.add("a", rid="another request with a grammar that waits")


@pytest.mark.parametrize("error", [InvalidRequestError("no", "regex"), KeyError("k"), Panic("p")])
def test_an_error_is_of_its_grammar_alone(compiler: Compiler, error: BaseException) -> None:
    compiler.error = error
    compiler.add("a")
    compiler.go()
    (job,) = compiler.take(1)
    assert job.matcher is None
    is_refused = isinstance(error, InvalidRequestError)
    assert (job.error is error) == is_refused
    assert ("its log" in str(job.error)) != is_refused
    compiler.error = None
    compiler.add("b")
    compiler.go()
    assert compiler.take(1)[0].matcher == "matcher of b"  # type: ignore[comparison-overlap]
    assert compiler.queue.find(Grammar("regex", "a")) is None


def test_the_grammars_used_last_are_kept(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_queue, "_MAX_KEPT", 2)
    compiler.go(3)
    for text in "abc":
        compiler.add(text)
        compiler.take(1)
        compiler.queue.find(Grammar("regex", "a"))
    kept = [text for text in "abc" if compiler.queue.find(Grammar("regex", text))]
    assert kept == ["a", "c"]
    assert compiler.queue.num_compiled == 3


def test_long_grammars_are_kept_up_to_a_sum_of_their_lengths(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_queue, "_MAX_KEPT_CHARS", 10)
    texts = ("aaaa", "bbbb", "cc", "ddd", "e" * 11, "ff")
    compiler.go(len(texts))
    kept = []
    for text in texts:
        compiler.add(text)
        compiler.take(1)
        kept.append([each for each in texts if compiler.queue.find(Grammar("regex", each))])
    assert kept[2] == ["aaaa", "bbbb", "cc"]
    assert kept[3] == ["bbbb", "cc", "ddd"]
    assert kept[4] == ["e" * 11]  # the last is kept however long it is
    assert kept[5] == ["ff"]


def _chain(names: list[str]) -> Grammar:
    """A grammar of as many rules as fit, each of which is the next."""
    rules = [f"{name}:{after}" for name, after in pairwise(names)]
    return Grammar("ebnf", "\n".join([f"start: {names[0]}", *rules, f'{names[-1]}: "x"']))


def _chain_of_schemas(names: list[str]) -> Grammar:
    parts = {name: {"items": {"$ref": f"#/$defs/{after}"}} for name, after in pairwise(names)}
    schema = {"$defs": {**parts, names[-1]: {}}, "$ref": f"#/$defs/{names[0]}"}
    return Grammar("json_schema", json.dumps(schema, separators=(",", ":")))


@pytest.mark.parametrize("make", [_chain, _chain_of_schemas])
@pytest.mark.parametrize("convert", [str.lower, str.upper])
def test_a_long_chain_of_rules_does_not_end_the_process(
    tmp_path: Path, make: Callable[[list[str]], Grammar], convert: Callable[[str], str]
) -> None:
    """In a process of its own, which a stack that overflows ends."""
    names = [convert("".join(each)) for each in product("abcdefghijklmnopqrstuvwxyz", repeat=3)]
    names.remove(convert("end"))
    most = 1 << 12
    while len(make(names[:most]).text) > MAX_GRAMMAR_CHARS:
        most -= 100
    grammar = make(names[:most])
    assert len(grammar.text) > MAX_GRAMMAR_CHARS // 2
    folder = save(byte_level(), tmp_path / "tokenizer")
    (tmp_path / "grammar").write_text(grammar.text)
    command = [sys.executable, "-c", _COMPILE, str(folder), grammar.kind, str(tmp_path / "grammar")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]


_COMPILE = """
import sys, time
from pathlib import Path
from sgl_jax.core.grammar import Grammar
from sgl_jax.grammar.compile_queue import CompileQueue
from sgl_jax.grammar.compiler import GrammarCompiler

compiler = GrammarCompiler(sys.argv[1], 512, (0,))
queue = CompileQueue(compiler.compile, lambda rid: True, 1)
assert queue.add(Grammar(sys.argv[2], Path(sys.argv[3]).read_text()), "x", "")
while not (jobs := queue.take()):
    time.sleep(0.01)
queue.close()
compiler.follow(jobs[0].matcher).expected()
"""
