"""The load is one that the server takes, or is refused with what to change."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sgl_jax.bench.serve import LoadError, ServerFacts, main, make_load, parse_args

DEMO = ServerFacts(vocab_size=768, max_request_tokens=512)


@contextmanager
def server(received: list[list[int]] | None = None, **answers: object) -> Iterator[str]:
    """Answers GET /name with answers[name] as JSON, all else with 404; appends the prompts of POST
    to `received`, and answers each with as many tokens as it asks for, 512 of them cached."""
    received = [] if received is None else received

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.lstrip("/"))
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append(body["input_ids"])
            self.send_response(200)
            self.end_headers()
            counts = {"completion_tokens": body["sampling_params"]["max_new_tokens"]}
            event = {"meta_info": {**counts, "cached_tokens": 512}}
            self.wfile.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


def test_token_ids_are_of_the_servers_vocabulary() -> None:
    load = make_load(parse_args([]), DEMO)
    assert max(max(prompt) for prompt in load.prompts) < 768
    assert len(load.prompts) == 64


def test_a_smaller_vocabulary_may_be_asked_for_a_larger_one_not() -> None:
    load = make_load(parse_args(["--vocab-size", "400"]), DEMO)
    assert max(max(prompt) for prompt in load.prompts) < 400
    with pytest.raises(LoadError, match="--vocab-size 1024 is more than the server's 768"):
        make_load(parse_args(["--vocab-size", "1024"]), DEMO)


def test_a_server_that_tells_nothing_needs_the_vocabulary_to_be_told() -> None:
    silent = ServerFacts(None, None)
    with pytest.raises(LoadError, match="give --vocab-size"):
        make_load(parse_args([]), silent)
    make_load(parse_args(["--vocab-size", "1024", "--random-input-len", "9000"]), silent)


@pytest.mark.parametrize(
    ("words", "prompt_len"),
    [(["--random-input-len", "449"], 449), (["--shared-prefix-len", "448"], 449)],
)
def test_requests_longer_than_the_server_takes_are_refused(
    words: list[str], prompt_len: int
) -> None:
    with pytest.raises(
        LoadError, match=rf"prompts of {prompt_len} tokens and answers of 64 exceed the 512 tokens"
    ):
        make_load(parse_args(words), DEMO)
    make_load(parse_args(["--random-input-len", "448"]), DEMO)


def test_facts_are_what_either_route_tells() -> None:
    with server(get_model_info={"vocab_size": 768, "max_request_tokens": 512}) as url:
        assert ServerFacts.read(url) == DEMO
    with server(get_server_info={"vocab_size": 9, "context_length": 70}) as url:
        assert ServerFacts.read(url) == ServerFacts(9, 70)
    with server() as url:
        assert ServerFacts.read(url) == ServerFacts(None, None)


def test_a_load_that_cannot_be_sent_ends_with_a_sentence(capsys: pytest.CaptureFixture) -> None:
    with server(get_model_info={"vocab_size": 768, "max_request_tokens": 512}) as url:
        assert main(["--base-url", url, "--random-input-len", "1000"]) == 2
    assert "exceed the 512 tokens" in capsys.readouterr().err
    assert main(["--base-url", url]) == 2
    assert "no server responds at" in capsys.readouterr().err


def recording(path: Path) -> str:
    """Two agents: the first has three turns, of which the second comes after a tool call; the
    prompt of the last request is longer than the server takes."""
    turns = [
        ("a", 0, 600, [1, 2], "tool_use", 0.0),
        ("b", 0, 700, [1, 3], "", 0.0),
        ("a", 5, 1030, [1, 2, 4], "end_turn", 0.2),
        ("a", 9, 5000, list(range(10, 20)), "", 1000.0),
    ]
    lines = [
        json.dumps(
            {"timestamp": ms, "input_length": length, "output_length": 3, "hash_ids": ids}
            | {"agent": agent, "stop": stop, "think_s": think_s}
        )
        for agent, ms, length, ids, stop, think_s in turns
    ]
    path.write_text("\n".join(lines))
    return str(path)


def test_recorded_agents_are_replayed_in_a_closed_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    received: list[list[int]] = []
    facts = {"vocab_size": 768, "max_request_tokens": 4000}
    figures = tmp_path / "figures.jsonl"
    with server(received, get_model_info=facts) as url:
        words = ["--base-url", url, "--trace", recording(tmp_path / "trace.jsonl")]
        more = ["--closed-loop", "--warmup-requests", "0", "--output-file", str(figures)]
        assert main([*words, *more]) == 0
    assert "1 requests of more than 4000 tokens are left out" in capsys.readouterr().err
    assert sorted(map(len, received[:2])) == [600, 700]
    assert len(received[2]) == 1030
    first = next(prompt for prompt in received if len(prompt) == 600)
    assert received[2][:600] == first
    assert 300 <= min(map(min, received)) <= max(map(max, received)) < 752
    values = json.loads(figures.read_text())
    assert values["successful_requests"] == 3
    assert values["duration_s"] >= 0.2
    assert values["cached_input_tokens"] == 3 * 512
    assert values["turns_after a tool call"] == 1
    assert values["hit_rate_after a tool call"] == pytest.approx(512 / 1030)


def test_no_request_is_sent_after_the_duration(tmp_path: Path) -> None:
    received: list[list[int]] = []
    with server(received, get_model_info={"vocab_size": 768}) as url:
        words = ["--base-url", url, "--trace", recording(tmp_path / "trace.jsonl")]
        more = ["--closed-loop", "--duration-s", "0.1", "--warmup-requests", "1"]
        assert main([*words, *more]) == 0
    assert sorted(map(len, received)) == [600, 600, 700]


def test_a_recording_that_cannot_be_read_ends_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with server(get_model_info={"vocab_size": 768}) as url:
        assert main(["--base-url", url, "--trace", str(tmp_path / "none.jsonl")]) == 2
    assert "No such file" in capsys.readouterr().err
