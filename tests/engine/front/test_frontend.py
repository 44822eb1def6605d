"""What clients may ask for, and what reaches them."""

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_jax.core.engine_messages import FinishReason, OutputBatch, Reply, RequestOutput
from sgl_jax.core.errors import EngineDeadError, InvalidRequestError, QueueFullError
from sgl_jax.core.messages import AbortRequest, GetState, SessionTurn, StopRequest
from sgl_jax.core.request_limits import MAX_OWNER_CHARS, MAX_SESSION_ID_CHARS
from sgl_jax.core.sampling_params import LOGPROBS_MODES, SamplingParams
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.front.frontend import Frontend
from sgl_jax.engine.front.request_checks import RequestChecks
from sgl_jax.engine.front.request_stream import Chunk, RequestStream
from sgl_jax.text.tokenizer import Tokenizer
from tests.engine.scripted_engine import EOS, MAX_RUNNING, DirectClient, ScriptedEngine
from tests.support.tokenizers import byte_level, load

MAX_QUEUED = 100
STRICT = ServerArgs(model_path="no tokenizer", strict_max_tokens=True)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level(), tmp_path_factory.mktemp("tokenizer"))


class Rig:
    """A frontend on a scripted engine, stepped by hand."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.client = DirectClient(ScriptedEngine())
        args = ServerArgs(model_path="no tokenizer", max_queued_requests=MAX_QUEUED)
        self.front = Frontend(args, tokenizer, self.client.engine.info, self.client.send)
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    def start(self, prompt: str, *, streaming: bool = True, **sampling: object) -> RequestStream:
        params = msgspec.convert(sampling, SamplingParams)
        request = self.front.checks.prepare(self.front.checks.encode(prompt), params)
        return self.front.submit(request, self.wake, streaming=streaming)

    def step(self, steps: int = 1) -> None:
        self.client.pump(self.front.handle, steps)

    def sent(self, kind: type) -> list[object]:
        return [message for message in self.client.sent if isinstance(message, kind)]


@pytest.fixture
def rig(tokenizer: Tokenizer) -> Rig:
    return Rig(tokenizer)


def take(stream: RequestStream) -> Chunk:
    chunk = stream.take()
    assert chunk is not None
    return chunk


def test_a_request_streams_to_its_end(rig: Rig) -> None:
    stream = rig.start("hello", max_new_tokens=50)
    text, ids = "", []
    for _ in range(50):
        rig.step()
        chunk = take(stream)
        text += chunk.text
        ids += chunk.token_ids
    assert chunk.finish == FinishReason(type="length")
    assert chunk.num_output_tokens == len(ids) == 50
    assert text == rig.front.tokenizer.decode(ids)
    assert stream.take() is None
    assert rig.front.num_open == 0


def test_outputs_that_wait_together_come_as_one_chunk(rig: Rig) -> None:
    stream = rig.start("hello", max_new_tokens=50)
    rig.step(7)
    assert len(take(stream).token_ids) == 7
    assert stream.take() is None


def test_tokens_that_came_together_share_their_time(rig: Rig) -> None:
    stream = rig.start("hello", max_new_tokens=50)
    rig.step()
    first_at = stream.last_token_at
    assert first_at is not None
    rid = stream.request.rid
    rig.front.handle(OutputBatch(outputs=[RequestOutput(rid, [5, 6, 7], 0, 0)]))
    assert stream.last_token_at is not None
    seconds = stream.last_token_at - first_at
    text = rig.front.metrics.exposition().decode()
    figures = dict(re.split(r"(?:{.*})? ", line) for line in text.splitlines() if line[0] != "#")
    assert float(figures["sglang:inter_token_latency_seconds_count"]) == 3
    assert abs(float(figures["sglang:inter_token_latency_seconds_sum"]) - seconds) < 1e-9


def test_a_request_that_does_not_stream_wakes_its_consumer_once(rig: Rig) -> None:
    rig.start("hello", streaming=False, max_new_tokens=20)
    rig.step(19)
    assert rig.wakes == 0
    rig.step()
    assert rig.wakes == 1


def test_a_stop_string_ends_the_request_here_and_in_the_engine(rig: Rig) -> None:
    stream = rig.start("one two three ", stop=["thr"], max_new_tokens=50)
    rig.step(50)
    chunk = take(stream)
    assert chunk.text == "one two "
    assert chunk.finish == FinishReason(type="stop", matched="thr")
    (told,) = rig.sent(StopRequest)
    assert isinstance(told, StopRequest)
    assert told.num_output_tokens == chunk.num_output_tokens == len(chunk.token_ids)
    decode = rig.front.tokenizer.decode
    assert "thr" in decode(chunk.token_ids)
    assert "thr" not in decode(chunk.token_ids[:-1])


def test_a_stop_string_may_be_kept(rig: Rig) -> None:
    stream = rig.start("one two three ", stop=["thr"], no_stop_trim=True, max_new_tokens=50)
    rig.step(50)
    assert take(stream).text == "one two thr"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("<|user|>", "one two"),  # a special token
        ("two<|user|>", "one "),  # half text, half token
        ("<|user|>three", "one two"),
        ("o<|user|>three<|assistant|>f", "one tw"),
        ("<|user|>t", "one two"),
        ("three", "one two"),
    ],
)
@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_may_hold_special_tokens(
    rig: Rig, stop: str, text: str, *, skip: bool
) -> None:
    prompt = "one two<|user|>three<|assistant|>four"
    stream = rig.start(prompt, stop=[stop], skip_special_tokens=skip, max_new_tokens=50)
    whole = rig.start(prompt, stop=[stop], streaming=False, max_new_tokens=50)
    shown = ""
    while stream.finish is None:
        rig.step()
        chunk = stream.take()
        shown += chunk.text if chunk else ""
    assert shown == ("one two<|user|>" if stop == "three" and not skip else text)
    assert stream.finish == FinishReason(type="stop", matched=stop)
    assert take(whole).text == text


def test_a_kept_stop_string_is_shown_without_special_tokens(rig: Rig) -> None:
    stream = rig.start("a<|user|>bc", stop=["<|user|>b"], no_stop_trim=True, max_new_tokens=9)
    rig.step(9)
    assert take(stream).text == "ab"


def test_the_end_token_may_complete_a_stop_string(rig: Rig) -> None:
    for stop, text in (("</s>", "one two"), ("two</s>", "one ")):
        for skip in (True, False):
            stream = rig.start("one two</s>", stop=[stop], skip_special_tokens=skip)
            rig.step(20)
            chunk = take(stream)
            assert (chunk.text, chunk.finish) == (text, FinishReason("stop", matched=stop))


def test_part_of_the_name_of_a_hidden_token_is_no_stop_string(rig: Rig) -> None:
    stream = rig.start("one<|user|>two</s>", stop=["user", "s>", "|"])
    rig.step(20)
    chunk = take(stream)
    assert (chunk.text, chunk.finish) == ("onetwo", FinishReason("stop", matched=EOS))


def test_a_special_token_that_the_tokenizer_does_not_name_is_hidden_too(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rust = byte_level()
    rust.add_special_tokens(["<|end_of_turn|>"])
    rig = Rig(load(rust, tmp_path_factory.mktemp("unnamed")))
    hidden = rig.start("a<|end_of_turn|>b", max_new_tokens=3)
    stopped = rig.start("a<|end_of_turn|>b", stop=["<|end_of_turn|>"], max_new_tokens=3)
    rig.step(3)
    assert take(hidden).text == "ab"
    assert take(stopped).finish == FinishReason("stop", matched="<|end_of_turn|>")


def test_a_stop_string_before_min_new_tokens_is_passed_over(rig: Rig) -> None:
    per_round = len(rig.front.checks.encode("one two three "))
    stream = rig.start("one two three ", stop=["two"], min_new_tokens=per_round, max_new_tokens=90)
    rig.step(90)
    assert take(stream).text == "one two three one "


def test_a_stop_string_that_begins_before_min_new_tokens_ends_the_request(rig: Rig) -> None:
    for text, stop in (("one two", " tw"), ("aé", "é")):
        ids = rig.front.checks.encode(text)
        minimum = next(
            n for n in range(len(ids) + 1) if stop in rig.front.tokenizer.decode(ids[:n])
        )
        stream = rig.start(text, stop=[stop], min_new_tokens=minimum, max_new_tokens=90)
        rig.step(90)
        chunk = take(stream)
        assert (chunk.text, chunk.num_output_tokens) == (text.partition(stop)[0], minimum)
        assert chunk.finish == FinishReason(type="stop", matched=stop)


def test_tokens_after_a_stop_string_in_the_same_output_are_dropped(rig: Rig) -> None:
    stream = rig.start("x", stop=["ab"], max_new_tokens=50)
    ids = rig.front.checks.encode("c ab")
    overshoot = rig.front.checks.encode("zz")
    rig.front.handle(OutputBatch([RequestOutput(stream.request.rid, ids + overshoot, 0, 0)]))
    chunk = take(stream)
    assert (chunk.text, chunk.token_ids) == ("c ", ids)


def test_held_text_appears_when_the_output_ends(rig: Rig) -> None:
    stream = rig.start("abc", stop=["abcX"], max_new_tokens=len(rig.front.checks.encode("abc")))
    rig.step(10)
    assert take(stream).text == "abc"


def test_the_stop_token_is_counted_but_has_no_text(rig: Rig) -> None:
    comma = rig.front.checks.encode(",")
    stream = rig.start("a,b", stop_token_ids=comma, max_new_tokens=50)
    rig.step(10)
    chunk = take(stream)
    assert chunk.text == "a"
    assert chunk.token_ids[-1] == comma[0]
    kept = rig.start("a,b", stop_token_ids=comma, no_stop_trim=True, max_new_tokens=50)
    rig.step(10)
    assert take(kept).text == "a,"


def test_special_tokens_are_text_only_on_request(rig: Rig) -> None:
    shown = rig.start("a</s>", ignore_eos=True, skip_special_tokens=False, max_new_tokens=2)
    hidden = rig.start("a</s>", ignore_eos=True, max_new_tokens=2)
    rig.step(2)
    assert take(shown).text == "a</s>"
    assert take(hidden).text == "a"
    assert EOS in shown.request.input_ids


def test_late_outputs_cannot_reach_a_new_request_of_the_same_name(rig: Rig) -> None:
    prompt = rig.front.checks.encode("a")
    old = rig.front.submit(rig.front.checks.prepare(prompt, SamplingParams(), rid="me"), rig.wake)
    rig.front.abandon(old)
    new = rig.front.submit(rig.front.checks.prepare(prompt, SamplingParams(), rid="me"), rig.wake)
    rig.front.handle(OutputBatch([], [[old.request.rid]], b"\5\0\0\0"))
    assert new.take() is None


def test_an_abandoned_stream_is_aborted_once(rig: Rig) -> None:
    stream = rig.start("hello")
    rig.step()
    rig.front.abandon(stream)
    rig.front.abandon(stream)
    rig.step(3)
    assert [m.rid for m in rig.sent(AbortRequest)] == [stream.request.rid]  # type: ignore[attr-defined]
    assert rig.client.engine.running == {}


def test_a_finished_stream_is_not_aborted(rig: Rig) -> None:
    stream = rig.start("hello", max_new_tokens=1)
    rig.step()
    rig.front.abandon(stream)
    assert rig.sent(AbortRequest) == []


@pytest.mark.parametrize("has_session", [True, False])
@pytest.mark.parametrize("is_taken", [True, False])
def test_the_engine_hears_of_a_turn_whose_end_was_not_delivered(
    rig: Rig, has_session: bool, is_taken: bool
) -> None:
    """It ended well there, and the session would go on from it."""
    session = SessionTurn(id="s") if has_session else None
    rig.client.engine.sessions.add("s")
    request = rig.front.checks.prepare([5], SamplingParams(max_new_tokens=1), session=session)
    stream = rig.front.submit(request, rig.wake)
    rig.step()
    if is_taken:
        take(stream)
    rig.front.abandon(stream)
    rig.front.abandon(stream)
    sent = rig.sent(AbortRequest)
    assert len(sent) == (has_session and not is_taken)
    if sent:
        (abort,) = sent
        assert isinstance(abort, AbortRequest)
        assert (abort.rid, abort.session) == (stream.request.rid, stream.request.session)
    assert rig.front.num_open == 0


def test_of_a_turn_left_in_flight_it_hears_whose_it_was(rig: Rig) -> None:
    rig.client.engine.sessions.add("s")
    request = rig.front.checks.prepare([5], SamplingParams(), session=SessionTurn(id="s"))
    stream = rig.front.submit(request, rig.wake)
    rig.step()
    rig.front.abandon(stream)
    (abort,) = rig.sent(AbortRequest)
    assert isinstance(abort, AbortRequest)
    assert abort.session == stream.request.session


def test_a_turn_that_was_refused_is_not_taken_back(rig: Rig) -> None:
    request = rig.front.checks.prepare([5], SamplingParams(), session=SessionTurn(id="missing"))
    stream = rig.front.submit(request, rig.wake)
    rig.step()
    assert stream.finish is not None
    rig.front.abandon(stream)
    assert rig.sent(AbortRequest) == []


@pytest.mark.parametrize("server", ["auto", *LOGPROBS_MODES])
def test_the_servers_mode_of_log_probabilities_replaces_the_apis(rig: Rig, server: str) -> None:
    args = ServerArgs(model_path="no tokenizer", logprobs_mode=server)
    checks = RequestChecks(rig.front.tokenizer, rig.front.facts, args)
    for usual in LOGPROBS_MODES:
        prepared = checks.prepare([1], SamplingParams(), usual_logprobs_mode=usual)
        assert prepared.logprobs_mode == (usual if server == "auto" else server)
        own = checks.prepare([1], SamplingParams(), logprobs_mode="processed")
        assert own.logprobs_mode == "processed"
    with pytest.raises(InvalidRequestError, match="one of raw, scaled, processed, got 'hot'"):
        checks.prepare([1], SamplingParams(), logprobs_mode="hot")


def test_a_default_length_is_marked_as_such(rig: Rig) -> None:
    strict = RequestChecks(rig.front.tokenizer, rig.front.facts, STRICT)
    for checks, sampling, is_default in (
        (strict, SamplingParams(), True),
        (strict, SamplingParams(max_new_tokens=9), False),
        # The engine may clamp it, too.
        (rig.front.checks, SamplingParams(max_new_tokens=9), True),
    ):
        request = checks.prepare([5], sampling, default_max_new_tokens=9)
        assert (request.sampling.max_new_tokens, request.is_length_default) == (9, is_default)


def test_a_failing_stream_does_not_lose_the_outputs_of_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, failing, after = (rig.start("hello", max_new_tokens=9) for _ in range(3))
    rig.step()  # the first outputs are whole ones, the later ones plain tokens

    def fail(_: object) -> None:
        raise RuntimeError("broken text")

    monkeypatch.setattr(failing, "accept_token", fail)
    rig.step()
    assert [take(stream).num_output_tokens for stream in (before, after)] == [2, 2]
    assert take(failing).num_output_tokens == 1  # what had arrived
    with pytest.raises(RuntimeError, match="broken text"):
        failing.take()
    (abort,) = rig.sent(AbortRequest)
    assert isinstance(abort, AbortRequest)
    assert abort.rid == failing.request.rid
    assert failing.request.rid in caplog.text
    monkeypatch.setattr(before, "accept", fail)
    rig.step(8)
    assert take(before).num_output_tokens == 8
    with pytest.raises(RuntimeError, match="broken text"):
        before.take()
    finish = take(after).finish
    assert finish is not None
    assert finish.type == "length"
    assert rig.front.num_open == 0
    rig.front.abandon(failing)
    assert len(rig.sent(AbortRequest)) == 2


def test_a_failing_consumer_does_not_hide_outputs_from_others(rig: Rig) -> None:
    def fail() -> None:
        raise RuntimeError("broken consumer")

    streams = [rig.start("hello", max_new_tokens=2) for _ in range(3)]
    streams[0].on_ready = fail
    rig.step()
    assert rig.wakes == 2
    assert rig.front.num_open == 2


def test_aborting_by_name_ends_the_stream_with_an_abort(rig: Rig) -> None:
    prompt = rig.front.checks.encode("a")
    stream = rig.front.submit(
        rig.front.checks.prepare(prompt, SamplingParams(), rid="me"), rig.wake
    )
    other = rig.start("other")
    rig.step()
    assert rig.front.abort("me") == 1
    rig.step()
    finish = take(stream).finish
    assert finish is not None
    assert finish.type == "abort"
    assert other.finish is None
    assert rig.front.abort("missing") == 0
    assert rig.front.abort("") == 1


def test_the_front_counts_what_the_engine_has_not_spoken_of(rig: Rig) -> None:
    streams = [rig.start("hello") for _ in range(MAX_QUEUED + MAX_RUNNING)]
    with pytest.raises(QueueFullError, match="--max-queued-requests"):
        rig.start("hello")
    for stream in streams:  # what was sent lies there, awaited or not
        rig.front.abandon(stream)
    with pytest.raises(QueueFullError):
        rig.start("hello")
    rig.step()
    rig.front.pending.check_room(MAX_QUEUED + MAX_RUNNING)
    stream = rig.start("hello")
    with pytest.raises(QueueFullError):
        rig.front.pending.check_room(MAX_QUEUED + MAX_RUNNING)
    rig.front.abandon(stream)


def test_more_requests_than_the_engine_ever_takes_are_a_fault_of_the_client(rig: Rig) -> None:
    most = MAX_QUEUED + MAX_RUNNING
    with pytest.raises(InvalidRequestError, match=f"at most {most}, got {most + 1}"):
        rig.front.pending.check_room(most + 1)


def test_an_engine_that_does_not_answer_is_asked_only_so_much(rig: Rig) -> None:
    for _ in range(1024):
        rig.front.call(GetState(), lambda reply: None)
    with pytest.raises(QueueFullError):
        rig.front.call(GetState(), lambda reply: None)
    rig.step()
    rig.front.call(GetState(), lambda reply: None)


def test_when_the_engine_dies_everyone_is_told(rig: Rig) -> None:
    stream = rig.start("hello")
    rig.step()
    replies: list[Reply] = []
    rig.front.call(GetState(), replies.append)
    rig.front.fail("it fell over")
    assert take(stream).token_ids != []  # what had arrived still counts
    with pytest.raises(EngineDeadError, match="it fell over"):
        stream.take()
    with pytest.raises(EngineDeadError, match="it fell over"):
        rig.start("hello")
    assert [reply.ok for reply in replies] == [False]


def test_questions_get_their_answers(rig: Rig) -> None:
    replies: list[Reply] = []
    rig.front.call(GetState(), replies.append)
    rig.step()
    assert replies[0].ok
    assert len(replies[0].data["ranks"]) == 2


def test_logprobs_line_up_with_the_tokens(rig: Rig) -> None:
    ids = rig.front.checks.encode("hello")
    request = rig.front.checks.prepare(
        ids,
        SamplingParams(max_new_tokens=4),
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=0,
    )
    stream = rig.front.submit(request, rig.wake)
    rig.step(4)
    chunk = take(stream)
    assert [entry.token_id for entry in chunk.logprobs] == chunk.token_ids
    assert [entry.token_id for entry in chunk.prompt_logprobs] == ids
    assert chunk.prompt_logprobs[0].logprob is None


def test_a_prompt_and_output_too_long_together_name_both_numbers(rig: Rig) -> None:
    strict = RequestChecks(rig.front.tokenizer, rig.front.facts, STRICT)
    both = SamplingParams(min_new_tokens=254, max_new_tokens=254)
    for checks, sampling, name in (
        (strict, SamplingParams(max_new_tokens=254), "max_new_tokens"),
        (rig.front.checks, both, "min_new_tokens"),
    ):
        with pytest.raises(InvalidRequestError, match=r"\(3 tokens\).*\(254\).*256") as caught:
            checks.prepare([5, 6, 7], sampling)
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("ids", "says"),
    [([], "empty"), ([5] * 256, "256 tokens"), ([5, 512], "512"), ([-1], "-1")],
)
def test_a_bad_prompt_is_refused(rig: Rig, ids: list[int], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        rig.front.checks.prepare(ids, SamplingParams())
    assert caught.value.param == "input_ids"


def test_an_enormous_text_is_refused_without_tokenising_it(rig: Rig) -> None:
    with pytest.raises(InvalidRequestError, match="characters"):
        rig.front.checks.encode("x" * 1_000_000)


@pytest.mark.parametrize(
    ("option", "value"),
    [("top_logprobs_num", 21), ("logprob_start_len", 2), ("dp_rank", 2), ("rid", "")],
)
def test_an_option_out_of_range_is_named(rig: Rig, option: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        rig.front.checks.prepare([5], SamplingParams(), **{option: value})  # type: ignore[arg-type]
    assert caught.value.param == option


@given(
    prompt_len=st.integers(1, 255),
    default=st.none() | st.integers(1, 400),
    min_new=st.integers(0, 300),
)
@settings(deadline=None)
def test_a_default_length_never_makes_a_request_too_long(
    tokenizer: Tokenizer, prompt_len: int, default: int | None, min_new: int
) -> None:
    front = Rig(tokenizer).front
    sampling = SamplingParams(min_new_tokens=min_new)
    room = 256 - prompt_len
    if min_new > room:
        with pytest.raises(InvalidRequestError) as caught:
            front.checks.prepare([5] * prompt_len, sampling, default_max_new_tokens=default)
        assert caught.value.param == "min_new_tokens"
        return
    request = front.checks.prepare([5] * prompt_len, sampling, default_max_new_tokens=default)
    wanted = room if default is None else default
    assert request.sampling.max_new_tokens == min(room, max(min_new, wanted))


@given(stop_at=st.integers(0, 30), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=40))
@settings(deadline=None, max_examples=50)
def test_the_text_does_not_depend_on_when_it_is_taken(
    tokenizer: Tokenizer, stop_at: int, sizes: list[int]
) -> None:
    rig = Rig(tokenizer)
    prompt = "naïve 東京 😀 text, again "
    stop = [prompt[stop_at : stop_at + 3]] if stop_at < len(prompt) - 3 else []
    stream = rig.start(prompt, max_new_tokens=40, stop=stop)
    text = ""
    for size in [*sizes, 40]:
        rig.step(size)
        chunk = stream.take()
        text += chunk.text if chunk else ""
    whole = rig.front.tokenizer.decode((stream.request.input_ids * 40)[:40])
    assert text == (whole.split(stop[0])[0] if stop else whole)


def test_a_turn_that_ended_beyond_its_stop_string_is_cut_in_its_session(rig: Rig) -> None:
    turn = SessionTurn(id="s")
    sampling = SamplingParams(max_new_tokens=50, stop=("thr",))
    rig.client.engine.sessions.add("s")
    request = rig.front.checks.prepare(
        rig.front.checks.encode("one two three "), sampling, rid="me", session=turn
    )
    stream = rig.front.submit(request, rig.wake)
    ids = list(request.input_ids)
    ended = RequestOutput(stream.request.rid, ids, 0, 0, FinishReason("length"), prompt_tokens=99)
    rig.front.handle(OutputBatch([ended]))
    chunk = take(stream)
    assert chunk.finish == FinishReason(type="stop", matched="thr")
    assert len(chunk.token_ids) < len(ids)
    assert stream.num_prompt_tokens == 99
    (told,) = rig.sent(StopRequest)
    assert told == StopRequest(
        rid=stream.request.rid,
        num_output_tokens=len(chunk.token_ids),
        session=SessionTurn(id="s", name="me", bos_token_id=rig.front.tokenizer.bos_token_id),
    )


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        (SessionTurn(id=""), "session_params.id"),
        (SessionTurn(id="s" * (MAX_SESSION_ID_CHARS + MAX_OWNER_CHARS + 1)), "session_params.id"),
        (SessionTurn(id="s", rid=""), "session_params.rid"),
        (SessionTurn(id="s", offset=-(10**6)), "session_params.offset"),
    ],
)
def test_what_no_session_can_be_asked_is_refused(rig: Rig, turn: SessionTurn, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        rig.front.checks.prepare([5], SamplingParams(), session=turn)
    assert refusal.value.param == param
