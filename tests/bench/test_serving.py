"""The load is one that the server takes, or is refused with what to change."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sgl_jax.bench.serve import LoadError, ServerFacts, main, make_load, parse_args

DEMO = ServerFacts(vocab_size=768, max_request_tokens=512)


@contextmanager
def server(**answers: object) -> Iterator[str]:
    """Answers GET /name with answers[name] as JSON, all else with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.lstrip("/"))
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

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
