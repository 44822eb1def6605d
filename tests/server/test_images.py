"""Images of all APIs become pseudo-ids and pixels of a `GenerateRequest`."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_jax.core.image_input import ImageInput, image_token_ids
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.text.tokenizer import Tokenizer
from tests.engine.scripted_engine import ScriptedEngine
from tests.server.conftest import Rig, serving, text_workers
from tests.support.images import data_uri, image_file, save_image_model

pytestmark = pytest.mark.anyio

ROOM = 200  # tokens of a request
RED, BLUE = image_file("red"), image_file("blue", 96, 128)
RED_URI, BLUE_URI = data_uri(RED), data_uri(BLUE)
RED_TOKENS, BLUE_TOKENS = 4, 12
START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = save_image_model(tmp_path_factory.mktemp("images") / "model")
    yield folder
    text_workers(folder).close()


@pytest.fixture
async def seeing(folder: Path) -> AsyncIterator[Rig]:
    async with seeing_server(folder) as rig:
        yield rig


def seeing_server(folder: Path, **settings: Any) -> AbstractAsyncContextManager[Rig]:
    engine = ScriptedEngine(
        tokenizer_folder=str(folder), max_request_tokens=ROOM, takes_images=True
    )
    return serving(folder, Tokenizer.load(str(folder)), engine=engine, **settings)


async def post(rig: Rig, path: str, status: int = 200, **body: Any) -> Any:
    answer = await rig.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def ask(rig: Rig, content: Any, status: int = 200, **fields: Any) -> Any:
    messages = content if "messages" in fields else [{"role": "user", "content": content}]
    body = {"messages": messages, "max_tokens": 1} | fields
    return await post(rig, "/v1/chat/completions", status, **body)


def sent(rig: Rig) -> GenerateRequest:
    return [each for each in rig.engine.seen if isinstance(each, GenerateRequest)][-1]


def prompt_of(rig: Rig, request: GenerateRequest | None = None) -> str:
    """The text of the prompt, with the color of each image in its place."""
    request = request or sent(rig)
    parts, begin = [], 0
    decode = partial(rig.front.tokenizer.decode, skip_special_tokens=False)
    for image in request.images:
        parts.append(decode(request.input_ids[begin : image.start]))
        begin = image.start + image.num_tokens
        assert request.input_ids[image.start : begin] == ids_of(image)
        parts.append({(255, 0, 0): "[red]", (0, 0, 255): "[blue]"}[color_of(image)])
    return "".join([*parts, decode(request.input_ids[begin:])])


def ids_of(image: ImageInput) -> list[int]:
    sizes = (image.height, image.width)
    return image_token_ids(*sizes, image.pixels, image.num_tokens, ScriptedEngine.vocab_size)


def color_of(image: ImageInput) -> tuple[int, ...]:
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
    assert (pixels == pixels[0, 0]).all()
    return tuple(map(int, pixels[0, 0]))


def seen(color: str) -> str:
    return f"{START}[{color}]{END}"


def part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


async def test_images_of_a_chat_are_in_their_places(seeing: Rig) -> None:
    content = [text("first"), part(RED_URI), text(""), part(BLUE_URI, detail="high"), text("then")]
    answer = await ask(seeing, content)
    assert prompt_of(seeing) == (f"<|user|>first{seen('red')}{seen('blue')}then</s><|assistant|>")
    red, blue = sent(seeing).images
    assert (red.height, red.width, red.num_tokens) == (64, 64, RED_TOKENS)
    assert (blue.height, blue.width, blue.num_tokens) == (96, 128, BLUE_TOKENS)
    assert answer["usage"]["prompt_tokens"] == len(sent(seeing).input_ids)
    shown = await ask(seeing, content, return_prompt_token_ids=True)
    ids = shown["choices"][0]["prompt_token_ids"]
    pad = seeing.front.tokenizer.special_tokens[PAD]
    assert len(ids) == len(sent(seeing).input_ids)
    assert ids.count(pad) == RED_TOKENS + BLUE_TOKENS
    # A message of an image only, in an older form; and the same image twice.
    await ask(seeing, [{"type": "image_url", "image_url": RED_URI}, part(RED_URI)])
    assert prompt_of(seeing) == f"<|user|>{seen('red') * 2}</s><|assistant|>"
    first, second = sent(seeing).images
    assert ids_of(first) == ids_of(second)
    # In a history.
    history = [
        {"role": "user", "content": [part(RED_URI), text("?")]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [part(BLUE_URI), text("?")]},
    ]
    await ask(seeing, history, messages=history)
    assert prompt_of(seeing) == (
        f"<|user|>{seen('red')}?</s><|assistant|>red</s><|user|>{seen('blue')}?</s><|assistant|>"
    )


async def test_other_apis_send_the_same_request(seeing: Rig) -> None:
    await ask(seeing, [part(RED_URI), text("what?")])
    wanted = sent(seeing)
    image = {"type": "input_image", "image_url": RED_URI, "detail": "auto"}
    items = [{"role": "user", "content": [image, {"type": "input_text", "text": "what?"}]}]
    await post(seeing, "/v1/responses", input=items, max_output_tokens=1)
    assert_same(sent(seeing), wanted)
    # The declared type is wrong.
    source = {"type": "base64", "media_type": "image/gif", "data": base64.b64encode(RED).decode()}
    content = [{"type": "image", "source": source}, text("what?")]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
    await post(seeing, "/v1/messages", max_tokens=1, **body)
    assert_same(sent(seeing), wanted)
    counted = await post(seeing, "/v1/messages/count_tokens", **body)
    assert counted["input_tokens"] == len(wanted.input_ids)
    messages = [{"role": "user", "content": [part(RED_URI), text("what?")]}]
    tokens = await post(seeing, "/tokenize", messages=messages)
    assert tokens["count"] == len(tokens["tokens"]) == len(wanted.input_ids)
    assert max(tokens["tokens"]) < ScriptedEngine.vocab_size
    prompt = f"<|user|>{START}{PAD}{END}what?</s><|assistant|>"
    one = {"max_new_tokens": 1}
    ids = seeing.front.tokenizer.encode(prompt)
    for given in ({"text": prompt}, {"input_ids": ids}, {"text": [prompt]}):
        for image_data in (RED_URI, [base64.b64encode(RED).decode()], [[RED_URI]]):
            await post(seeing, "/generate", **given, image_data=image_data, sampling_params=one)
            assert_same(sent(seeing), wanted)
    prompts = [prompt, "hi", prompt * 2]
    await post(
        seeing,
        "/generate",
        text=prompts,
        image_data=[RED_URI, None, [RED_URI, BLUE_URI]],
        sampling_params=one,
    )
    requests = [each for each in seeing.engine.seen if isinstance(each, GenerateRequest)][-3:]
    assert [len(each.images) for each in requests] == [1, 0, 2]
    assert [prompt_of(seeing, each) for each in requests] == [
        prompt.replace(PAD, "[red]"),
        "hi",
        prompt.replace(PAD, "[red]") + prompt.replace(PAD, "[blue]"),
    ]


def assert_same(request: GenerateRequest, wanted: GenerateRequest) -> None:
    assert request.input_ids == wanted.input_ids
    assert request.images == wanted.images


async def test_results_of_tools_have_images(seeing: Rig) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    shown = [text("here"), part(RED_URI)]
    chat = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": shown},
    ]
    await ask(seeing, chat, messages=chat)
    wanted = sent(seeing)
    assert prompt_of(seeing).endswith(f"<|tool|>here{seen('red')}</s><|assistant|>")
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [
                {"type": "input_text", "text": "here"},
                {"type": "input_image", "image_url": RED_URI},
            ],
        },
    ]
    await post(seeing, "/v1/responses", input=items, max_output_tokens=1)
    assert_same(sent(seeing), wanted)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()}
    result = [text("here"), {"type": "image", "source": source}]
    messages = [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "see", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": result}],
        },
    ]
    await post(seeing, "/v1/messages", max_tokens=1, messages=messages)
    assert_same(sent(seeing), wanted)


async def test_a_stored_response_keeps_its_images(seeing: Rig) -> None:
    image = {"type": "input_image", "image_url": RED_URI}
    items = [{"role": "user", "content": [image]}]
    first = await post(seeing, "/v1/responses", input=items, max_output_tokens=1)
    await post(
        seeing,
        "/v1/responses",
        input="and now?",
        previous_response_id=first["id"],
        max_output_tokens=1,
    )
    assert prompt_of(seeing).startswith(f"<|user|>{seen('red')}</s><|assistant|>")
    assert "and now?" in prompt_of(seeing)
    listed = (await seeing.http.get(f"/v1/responses/{first['id']}/input_items")).json()
    assert listed["data"][0]["content"][0]["image_url"] == RED_URI


async def test_a_text_like_a_placeholder_stays_text(seeing: Rig) -> None:
    said = f"the token {PAD} of {START}{PAD}{END}"
    for content in (said, [text(said)], [text(said), part(RED_URI), text(said)]):
        await ask(seeing, content)
        pad = seeing.front.tokenizer.special_tokens[PAD]
        assert pad not in sent(seeing).input_ids
        assert said in prompt_of(seeing)
    function = {"name": PAD, "description": PAD, "parameters": {}}
    arguments = json.dumps({"a": PAD})
    call = {"type": "function", "function": {"name": "b", "arguments": arguments}}
    chat = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "user", "content": [part(RED_URI)]},
    ]
    await ask(seeing, chat, messages=chat, chat_template_kwargs={"kind": [function]})
    assert len(sent(seeing).images) == 1
    assert f'b{{"a": "{PAD}"}}' in prompt_of(seeing)


async def test_the_limits_name_the_field(seeing: Rig) -> None:
    async def refusal(content: Any, **fields: Any) -> Any:
        return (await ask(seeing, content, 400, **fields))["error"]

    large = data_uri(image_file("red", 256, 256))  # 64 tokens
    error = await refusal([part(large)] * 4)
    assert error["code"] == "context_length_exceeded"
    assert "prompt tokens" in error["message"]
    error = await refusal([part(RED_URI), part("data:image/png;base64,aGVsbG8=")])
    assert error["message"] == "image 2: it must be a PNG, JPEG or WebP file"
    assert (error["param"], error["code"]) == ("messages", "invalid_image")
    error = await refusal([part("https://example.com/a.png")])
    assert "--allowed-media-domains" in error["message"]
    error = await refusal([part(RED_URI)] * 6)
    assert "at most 5" in error["message"]
    for role in ("system", "assistant"):
        chat = [{"role": role, "content": [part(RED_URI)]}]
        error = await refusal(chat, messages=chat)
        assert error["param"] == "messages[0].content"
        assert f"a message of the {role} has text only" in error["message"]
    error = await refusal([{"type": "image_url", "image_url": {"url": RED_URI, "detail": "most"}}])
    assert error["param"] == "messages[0].content[0].image_url.detail"
    error = await refusal([{"type": "input_audio", "input_audio": {}}])
    assert error["message"] == "messages[0].content[0]: type must be text or image_url"
    error = await refusal([{"type": "text", "text": 7}])
    assert error["param"] == "messages[0].content[0].text"
    answer = await post(seeing, "/generate", 400, text="hi", image_data=[RED_URI])
    assert answer["error"]["param"] == "image_data"
    assert "which has 0" in answer["error"]["message"]
    mixed = {"text": PAD, "image_data": [RED_URI, [RED_URI]]}
    answer = await post(seeing, "/generate", 400, **mixed)
    assert answer["error"]["param"] == "image_data"


async def test_a_low_detail_has_fewer_tokens(seeing: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_jax.server.images.LOW_DETAIL_PIXELS", 64 * 64)
    await ask(seeing, [part(BLUE_URI, detail="low")])
    (image,) = sent(seeing).images
    assert image.num_tokens == 2


async def test_a_model_of_text_refuses_images(rig: Rig) -> None:
    error = (await ask(rig, [part(RED_URI), text("?")], 400))["error"]
    assert error["code"] == "unsupported_images"
    assert "takes no images" in error["message"]


async def answer_images(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A web server, of which only two pages are images."""
    head = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
    length = b"Content-Length: %d\r\n\r\n" % len(RED)
    answers = {
        b"/red.png?a=%20b": b"HTTP/1.1 200 OK\r\n" + length + RED,
        b"/chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"%x\r\n%b\r\n0\r\n\r\n" % (len(RED), RED),
        b"/moved": b"HTTP/1.1 302 Found\r\nLocation: /red.png\r\nContent-Length: 0\r\n\r\n",
        b"/long": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(20_000),
        b"/text": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        b"/noise": b"220 mail.example.com\r\n",
        b"/cut": b"HTTP/1.1 200 OK\r\n" + length + RED[:-40],
    }
    if head != b"/slow":
        writer.write(answers.get(head, b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"))
        writer.close()
    else:
        await reader.read()
        writer.close()


async def test_urls_are_fetched_from_listed_domains_only(folder: Path) -> None:
    web = await asyncio.start_server(answer_images, "127.0.0.1", 0)
    port = web.sockets[0].getsockname()[1]
    domains = f"example.com, localhost:{port}"
    limits = {"max_image_bytes": 10_000, "image_timeout_s": 3.0}
    async with web, seeing_server(folder, allowed_media_domains=domains, limits=limits) as rig:
        base = f"http://localhost:{port}"
        for path in ("/red.png?a= b", "/chunks"):
            await ask(rig, [part(base + path)])
            assert prompt_of(rig) == f"<|user|>{seen('red')}</s><|assistant|>"
        source = {"type": "url", "url": base + "/chunks"}
        messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        await post(rig, "/v1/messages", max_tokens=1, messages=messages)
        assert len(sent(rig).images) == 1
        refused = {
            base + "/moved": "status 302: redirects are not followed",
            base + "/none": "status 404",
            base + "/long": "exceeds the 10000 bytes",
            base + "/slow": "took longer than",
            base + "/text": "must be a PNG, JPEG or WebP file",
            base + "/noise": "cannot be fetched",
            base + "/cut": "cannot be decoded",
            f"http://127.0.0.1:{port}/chunks": "does not fetch from the domain",
            f"http://localhost:{port + 1}/chunks": "does not fetch from the domain",
            f"http://a@localhost:{port}/chunks": "does not fetch from the domain",
            f"http://localhost:{port}\\@example.com/": "the image: ",
            "http://localhost:x/": "cannot be read",
            "https://": "does not fetch from the domain",
        }
        for url, reason in refused.items():
            error = (await ask(rig, [part(url)], 400))["error"]
            assert reason in error["message"], url
            assert error["param"] == "messages"


async def test_fetched_images_of_a_request_count_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_jax.server.text_pool._MAX_PIXEL_BYTES", 3 * 64 * 64)
    web = await asyncio.start_server(answer_images, "127.0.0.1", 0)
    port = web.sockets[0].getsockname()[1]
    red = part(f"http://localhost:{port}/chunks")
    async with web, seeing_server(folder, allowed_media_domains=f"localhost:{port}") as rig:
        await ask(rig, [red])
        for content in ([red, red], [part(RED_URI), red]):
            error = (await ask(rig, content, 400))["error"]
            assert "the images of a request may have" in error["message"]
        assert rig.refs.texts._pixel_bytes == 0


async def test_a_request_of_images_leaves_no_pixels_behind(seeing: Rig) -> None:
    """Neither in its stream nor in the pool; and too many of them are refused."""
    await ask(seeing, [part(RED_URI), part(BLUE_URI)])
    assert seeing.refs.texts._pixel_bytes == 0
    pending = seeing.front.pending
    assert sum(pending._pixel_bytes.values()) == 0
    seeing.engine.stand_still()
    asking = asyncio.ensure_future(ask(seeing, [part(RED_URI)]))
    while not seeing.front.num_open:
        await asyncio.sleep(0.01)
    (stream,) = seeing.front._streams.values()
    assert [image.pixels for image in stream.request.images] == [b""]
    assert sum(pending._pixel_bytes.values()) == 3 * 64 * 64
    seeing.engine.go_on()
    await asking


@pytest.mark.parametrize("place", ["server.text_pool", "engine.front.pending_requests"])
async def test_too_many_pixels_of_one_request_are_its_fault_and_of_all_are_not(
    seeing: Rig, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    limit = f"sgl_jax.{place}._MAX_PIXEL_BYTES"
    monkeypatch.setattr(limit, 3 * 64 * 64 - 1)
    await ask(seeing, [part(RED_URI)], 400)
    assert seeing.refs.texts._pixel_bytes == 0
    monkeypatch.setattr(limit, 3 * 64 * 64)
    await ask(seeing, [part(RED_URI)])
    await ask(seeing, [part(RED_URI)] * 2, 400)
    seeing.engine.stand_still()
    first = asyncio.ensure_future(ask(seeing, [part(RED_URI)]))
    while not seeing.front.num_open:
        await asyncio.sleep(0.01)
    seeing.refs.texts._pixel_bytes += 1  # of a request whose other images are not decoded yet
    await ask(seeing, [part(RED_URI)], 503)
    seeing.refs.texts._pixel_bytes -= 1
    seeing.engine.go_on()
    await first
    await ask(seeing, [part(RED_URI)])
