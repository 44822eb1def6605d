"""Bad input against a live server: clear refusals, no 500, nothing leaked, still healthy."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.live.live_server import LiveServer, live_server
from tests.server.malformed_bodies import MALFORMED

NUM_BAD_BODIES = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--context-length", "256", "--max-running-requests", "4", "--check-memory", "busy")
    with live_server(
        tmp_path_factory.mktemp("live"),
        *(*flags, "--served-model-name", "default"),
        is_quickly_compiled=True,
    ) as server:
        yield server
        server.assert_nothing_leaked()
        # The check of health gives a token 20 s, and its program may have to be compiled.
        lone = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        httpx.post(server.url + "/generate", json=lone, timeout=240).raise_for_status()
        assert httpx.get(server.url + "/health_generate", timeout=60).status_code == 200


def test_every_malformed_body_is_refused_and_named(server: LiveServer) -> None:
    assert len(MALFORMED) >= NUM_BAD_BODIES
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for case in MALFORMED:
            headers = {"content-type": case.content_type} if case.content_type else {}
            answer = client.post(case.path, content=case.body, headers=headers)
            assert answer.status_code == case.status, (case.name, answer.text)
            error = answer.json()["error"]
            assert error["message"], case.name
            if case.param is not None:
                assert error["param"] == case.param, (case.name, error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("phases", "max_examples"),
    [
        ("examples,fuzzing", 5),
        pytest.param("examples,coverage,fuzzing,stateful", 30, marks=pytest.mark.long),
    ],
)
def test_what_the_schema_allows_never_breaks_the_server(
    server: LiveServer, tmp_path: Path, phases: str, max_examples: int
) -> None:
    """schemathesis makes requests from the server's own OpenAPI description, good and bad."""
    description = tmp_path / "openapi.json"  # schemathesis waits 10 s for it
    description.write_bytes(httpx.get(server.url + "/openapi.json", timeout=60).content)
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", str(description), "--url", server.url),
        *("--checks", "not_a_server_error,status_code_conformance,content_type_conformance"),
        *("--max-examples", str(max_examples), "--phases", phases, "--seed", "1"),
        # A trace writes to folders that the request names; and a server that was told to pause, to
        # release its memory, to await weights or to let nothing wait, does as it was told.
        *(
            "--exclude-path-regex",
            "profile|pause_generation|set_internal_state|occupation|from_tensor",
        ),
        *("--request-timeout", "60"),
    ]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout[-4000:]


def test_depth_and_size_are_bounded(server: LiveServer) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    big = json.dumps({"text": "a" * (40 << 20)}).encode()
    for body, status in ((deep, 400), (big, 413)):
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + "/generate", content=body, headers=headers, timeout=60)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
