"""A server with --enable-trace sends the spans of its requests to a collector."""

from collections.abc import Iterator
from concurrent import futures

import httpx
import pytest

from tests.live.live_server import live_server
from tests.support.otlp_receiver import PHASES, Receiver, receiving, values

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def client(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    flags = ("--enable-trace", "--otlp-traces-endpoint", receiver.endpoint)
    flags += ("--chunked-prefill-size", "16", "--test-retract")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms
        with (
            live_server(
                tmp_path_factory.mktemp("traces"), *flags, is_quickly_compiled=True
            ) as server,
            httpx.Client(base_url=server.url, timeout=60) as client,
        ):
            yield client
            receiver.spans.clear()
            body = {"text": "The last", "sampling_params": {"max_new_tokens": 1}}
            client.post("/generate", json=body).raise_for_status()
    assert receiver.named("request")  # what waits when the server ends is sent


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_is_a_trace_that_continues_the_clients(
    client: httpx.Client, receiver: Receiver, streams: bool
) -> None:
    name = f"answer-{streams}"
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "x-request-id": name}
    body = {"prompt": f"{streams}: The code of Anna is what I would like to hear now, please."}
    body |= {"model": "demo", "max_tokens": NUM_TOKENS, "stream": streams, "ignore_eos": True}
    client.post("/v1/completions", json=body, headers=headers).raise_for_status()
    request = receiver.wait(name)
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert request.kind == request.SPAN_KIND_SERVER
    receiver.assert_adds_up(request, PHASES)
    _, prefill, *_ = receiver.children(request)
    told = values(request)
    computed = sum(values(chunk)["sgl_jax.num_tokens"] for chunk in receiver.children(prefill))
    assert len(receiver.children(prefill)) > 1
    assert computed >= told["gen_ai.usage.input_tokens"]  # again after a retract
    assert told["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert told["gen_ai.request.model"] == "demo"
    assert told["gen_ai.request.stream"] == streams


def test_all_requests_of_one_answer_have_the_clients_span_as_parent(
    client: httpx.Client, receiver: Receiver
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID[::-1]}-{SPAN_ID}-01", "x-request-id": "twins"}
    body = {"text": "Tell me", "sampling_params": {"max_new_tokens": NUM_TOKENS, "n": 2}}
    client.post("/generate", json=body, headers=headers).raise_for_status()
    body = {"text": "The next", "sampling_params": {"max_new_tokens": 1}}
    client.post("/generate", json=body, headers={"x-request-id": "next"}).raise_for_status()
    assert receiver.wait("next").parent_span_id == b""
    twins = receiver.named("request", request_id="twins")
    assert [twin.parent_span_id.hex() for twin in twins] == [SPAN_ID] * 2


def test_retracts_are_events_within_the_phase_that_they_hit(
    client: httpx.Client, receiver: Receiver
) -> None:
    def ask(name: str) -> None:
        sampling = {"max_new_tokens": 30, "ignore_eos": True}
        body = {"text": f"{name} " * 20, "sampling_params": sampling}
        client.post("/generate", json=body, headers={"x-request-id": name}).raise_for_status()

    names = [f"retracted-{i}" for i in range(4)]
    with futures.ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(ask, names))
    num_events = 0
    for name in names:
        request = receiver.wait(name)
        receiver.assert_adds_up(request, PHASES)
        events = [event for phase in receiver.children(request) for event in phase.events]
        assert len(events) == values(request)["sgl_jax.num_retractions"]
        num_events += len(events)
    assert num_events


def test_a_client_that_goes_away_leaves_an_aborted_request(
    client: httpx.Client, receiver: Receiver
) -> None:
    body = {"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": 150}}
    body["sampling_params"] |= {"ignore_eos": True}  # type: ignore[operator]
    headers = {"x-request-id": "gone"}
    with client.stream("POST", "/generate", json=body, headers=headers) as answer:
        next(answer.iter_lines())
    request = receiver.wait("gone")
    receiver.assert_adds_up(request, PHASES[:3])
    told = values(request)
    assert told["gen_ai.response.finish_reasons"] == ("abort",)
    assert told["gen_ai.usage.output_tokens"] < 150
    assert request.status.code == request.status.STATUS_CODE_UNSET


def test_a_refused_request_is_no_span(client: httpx.Client, receiver: Receiver) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": -1}}
    assert client.post("/generate", json=body, headers={"x-request-id": "no"}).is_error
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 1}}
    client.post("/generate", json=body, headers={"x-request-id": "yes"}).raise_for_status()
    receiver.wait("yes")
    assert not receiver.named("request", request_id="no")
