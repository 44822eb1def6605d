"""Who may ask what, and how the server learns its keys."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from sgl_jax.core.command_line import parse_server_args
from sgl_jax.core.request_limits import MAX_SESSION_ID_CHARS, check_session_id
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.shares import Tenant
from sgl_jax.server.admin import call_routes, weight_routes
from sgl_jax.server.admin import management as management_routes
from sgl_jax.server.apis import native as native_routes
from sgl_jax.server.guards.bodies import BodyLimitMiddleware
from sgl_jax.server.guards.keys import (
    ADMIN_PATHS,
    MAX_NAME_CHARS,
    ApiKeyMiddleware,
    ApiKeys,
    Caller,
    SessionOwner,
)
from sgl_jax.server.guards.limits import Limits
from sgl_jax.server.memory import memory_routes
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import Rig, serving

CLIENTS, ADMINS = {"ann": "a1", "bob": "b2"}, {"root": "r0"}
ANN, ROOT = Caller("ann", is_admin=False), Caller("root", is_admin=True)


def keys_of(clients: dict[str, str], admins: dict[str, str]) -> ApiKeys:
    """The keys of these names."""
    callers = [(Caller(name, is_admin=False), key) for name, key in clients.items()]
    return ApiKeys([*callers, *((Caller(n, is_admin=True), key) for n, key in admins.items())])


def admit(keys: ApiKeys, path: str, *authorization: str) -> Caller | None:
    return keys.admit(path, [value.encode() for value in authorization])


def from_flags(*flags: str, **environment: str) -> ServerArgs:
    return parse_server_args(["--model-path", "m", *flags], environment)


def test_a_caller_has_the_name_of_its_key() -> None:
    keys = keys_of(CLIENTS, ADMINS)
    assert admit(keys, "/generate", "Bearer a1") == ANN
    assert admit(keys, "/generate", "bearer  a1 ") == ANN
    assert admit(keys, "/generate", "Bearer a1", "Bearer a1") == ANN  # of the client and a router
    assert admit(keys, "/generate", "BEARER r0") == ROOT


@pytest.mark.parametrize(
    "authorization",
    [
        *([], [""], ["Bearer"], ["Bearer "], ["Bearer x"], ["Basic a1"], ["a1"]),
        ["Bearer a1", "Bearer b2"],
    ],
)
def test_others_are_not_admitted(authorization: list[str]) -> None:
    assert admit(keys_of(CLIENTS, ADMINS), "/generate", *authorization) is None
    assert admit(keys_of(CLIENTS, {}), "/flush_cache", *authorization) is None


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_what_an_operator_does_needs_an_admin_key_if_there_is_one(path: str) -> None:
    keys = keys_of(CLIENTS, ADMINS)
    assert admit(keys, path, "Bearer a1") is None
    assert admit(keys, path, "Bearer r0") == ROOT
    assert admit(keys_of(CLIENTS, {}), path, "Bearer a1") == ANN


def test_with_an_admin_key_alone_the_model_is_open() -> None:
    keys = keys_of({}, ADMINS)
    assert admit(keys, "/generate") == Caller("anonymous", is_admin=False)
    assert admit(keys, "/flush_cache") is None


def test_without_keys_everything_is_open() -> None:
    keys = ApiKeys.from_args(ServerArgs())
    assert keys.is_open
    caller = admit(keys, "/flush_cache")
    assert caller is not None
    assert caller.is_admin


def test_keys_come_from_flags_environment_and_files(tmp_path: Path) -> None:
    clients, admins = tmp_path / "clients", tmp_path / "admins"
    clients.write_text("# who may ask\n\nann a1\n  b2  \n")
    admins.write_text("root r0\n")
    files = ("--api-key-file", str(clients), "--admin-api-key-file", str(admins))
    keys = ApiKeys.from_args(from_flags(*files, SGL_JAX_API_KEY="c3", SGL_JAX_ADMIN_API_KEY="r1"))
    found = {key: admit(keys, "/generate", f"Bearer {key}") for key in ("a1", "b2", "c3", "r0")}
    assert {key: caller and caller.name for key, caller in found.items()} == {
        "a1": "ann",
        "b2": "key-4",
        "c3": "key",
        "r0": "root",
    }
    assert admit(keys, "/flush_cache", "Bearer r1") == Caller("admin", is_admin=True)
    assert from_flags("--api-key", "flag", SGL_JAX_API_KEY="c3").api_key == "flag"


def test_a_key_of_a_file_is_a_tenant_with_the_limits_on_its_line(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.write_text("ann a1 weight=2.5 max_running=4\nbob b2 max_queued=7\nc3\n")
    keys = ApiKeys.from_args(from_flags("--api-key-file", str(clients), "--api-key", "e5"))
    callers = [admit(keys, "/generate", f"Bearer {key}") for key in ("a1", "b2", "c3", "e5")]
    assert [caller and caller.tenant for caller in callers] == [
        Tenant(name="ann", weight=2.5, max_running=4),
        Tenant(name="bob", max_queued=7),
        Tenant(name="key-3"),
        None,
    ]


@pytest.mark.parametrize("key", ["", " ", "\t"])
@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key"])
def test_an_empty_key_is_refused(flag: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_flags(flag, key)
    assert f"{flag} is empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SGL_JAX_API_KEY", "SGL_JAX_ADMIN_API_KEY"])
def test_an_empty_variable_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_flags(**{name: ""})
    assert f"{name} is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no API key"),
        ("# nothing\n", "holds no API key"),
        ("a b c\n", "line 1: must be KEY, or NAME KEY "),
        ("a b weight=1 max=2\n", "line 1: must be KEY, or NAME KEY "),
        ("b weight=1\n", "line 1: a key with options needs a name"),
        ("a b weight=0\n", "line 1: weight must be above 0"),
        ("a b weight=nan\n", r"line 1: weight must be a number from 0 to 1e\+06, got 'nan'"),
        ("a b weight=-1\n", "line 1: weight must be a number"),
        ("a b max_queued=\n", r"line 1: max_queued must be a number from 0 to 1e\+07, got ''"),
        ("a b max_running=1.5\n", "line 1: max_running must be a whole number, got '1.5'"),
        ("a b weight=1 weight=2\n", "line 1: weight stands there twice"),
        ("ann a1\nann a2\n", "line 2: the name 'ann' is taken"),
        ("ann a1\nbob a1\n", "the same as another one"),
    ],
)
def test_a_bad_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        ApiKeys.from_args(ServerArgs(api_key_file=str(path)))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match="/no/such/file"):
        ApiKeys.from_args(ServerArgs(admin_api_key_file="/no/such/file"))


def test_names_are_not_shared_by_clients_and_admins() -> None:
    with pytest.raises(ValueError, match="both named 'ann'"):
        keys_of({"ann": "a"}, {"ann": "b"})


def test_a_name_fits_into_the_ids_of_its_sessions() -> None:
    longest = "\U0001f511" * MAX_NAME_CHARS
    assert keys_of({longest: "a"}, {}).admit("/generate", [b"Bearer a"]) is not None
    engine_id = SessionOwner(Caller(longest, is_admin=False)).engine_id("s" * MAX_SESSION_ID_CHARS)
    check_session_id(engine_id)
    with pytest.raises(ValueError, match="at most 64 characters, one has 65"):
        keys_of({"x" * 65: "a"}, {})


def test_no_key_has_the_name_of_callers_without_one() -> None:
    for clients, admins in (({"anonymous": "a"}, {}), ({}, {"anonymous": "a"})):
        with pytest.raises(ValueError, match="'anonymous' is the name of callers without a key"):
            keys_of(clients, admins)


def test_no_key_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_flags("--help", SGL_JAX_API_KEY="hush-hush")
    assert "hush-hush" not in capsys.readouterr().out
    public = from_flags("--api-key", "hush", "--admin-api-key", "hush2").public()
    assert (public["api_key"], public["admin_api_key"]) == ("***", "***")
    assert ServerArgs().public()["api_key"] is None


@pytest.mark.anyio
async def test_a_stranger_is_refused_before_anything_is_read() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("reached")

    async def receive() -> Any:
        raise AssertionError("read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    guarded = ApiKeyMiddleware(BodyLimitMiddleware(app, Limits()), keys_of(CLIENTS, ADMINS))
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    await guarded(scope, receive, send)
    assert sent[0]["status"] == 401


@asynccontextmanager
async def rig_with(folder: Path, tokenizer: Tokenizer, **settings: Any) -> AsyncIterator[Rig]:
    async with serving(folder, tokenizer, **settings) as rig:
        yield rig


@pytest.mark.anyio
async def test_a_request_is_aborted_by_the_key_that_sent_it_or_an_admins(
    model_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("ann a1\nbob b2\n")
    settings = {"api_key_file": str(tmp_path / "keys"), "admin_api_key": "r0", "step_s": 0.05}
    everything = {"abort_all": True}
    body = {"text": "a", "rid": "me", "sampling_params": {"max_new_tokens": 200}}
    routes = {"/generate": body, "/v1/completions": {"prompt": "a", "rid": "me", "max_tokens": 200}}
    async with rig_with(model_folder, tokenizer, **settings) as rig:

        async def abort(key: str, **body: Any) -> int:
            headers = {"authorization": f"Bearer {key}"}
            answer = await rig.http.post("/abort_request", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return int(answer.json()["aborted"])

        for path, body in routes.items():
            for key, named in (("a1", {"rid": "me"}), ("r0", {"rid": "me"}), ("a1", everything)):
                headers = {"authorization": "Bearer a1"}
                running = asyncio.create_task(rig.http.post(path, json=body, headers=headers))
                async with asyncio.timeout(5):
                    while not rig.engine.running:
                        await asyncio.sleep(0.01)
                # As of a name that is not in use.
                assert await abort("b2", rid="me") == await abort("b2", rid="missing") == 0
                assert await abort("b2", **everything) == 0
                assert rig.engine.running
                assert await abort(key, **named) == 1
                await running
                await rig.until_idle()


@pytest.mark.anyio
async def test_anthropics_clients_send_their_key_in_a_header_of_its_own(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    async with rig_with(model_folder, tokenizer, api_key="a") as rig:
        for path, headers, status in (
            ("/v1/messages/count_tokens", {"x-api-key": "a"}, 200),
            ("/v1/messages/count_tokens", {"authorization": "Bearer a"}, 200),
            ("/v1/messages/count_tokens", {"x-api-key": "b"}, 401),
            ("/v1/messages/count_tokens", {"x-api-key": "a", "authorization": "Bearer b"}, 401),
            ("/v1/messages", {}, 401),
            ("/tokenize", {"x-api-key": "a"}, 401),
        ):
            answer = await rig.http.post(path, json=body, headers=headers)
            assert answer.status_code == status, (path, headers, answer.text)
            is_anthropics = "error" in answer.json() and answer.json().get("type") == "error"
            assert is_anthropics == (status == 401 and path != "/tokenize")


@pytest.mark.anyio
async def test_routes_of_the_operator_ask_for_the_admin_key(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with rig_with(model_folder, tokenizer, api_key="a", admin_api_key="b") as rig:
        client, admin = ({"authorization": f"Bearer {key}"} for key in "ab")
        for method, path in (
            ("POST", "/flush_cache"),
            ("GET", "/flush_cache"),
            ("POST", "/pause_generation"),
            ("POST", "/continue_generation"),
            ("GET", "/get_server_info"),
            ("GET", "/server_info"),
        ):
            assert (await rig.http.request(method, path, headers=client)).status_code == 401
            assert (await rig.http.request(method, path, headers=admin)).status_code == 200
        # All routes of the operator are there, and sessions and figures are not among them.
        routes = {route.path for route in management_routes.router.routes}  # type: ignore[attr-defined]
        routes |= {route.path for route in call_routes.router.routes}  # type: ignore[attr-defined]
        routes |= {route.path for route in weight_routes.router.routes}  # type: ignore[attr-defined]
        routes |= {route.path for route in native_routes.router.routes}  # type: ignore[attr-defined]
        routes |= {route.path for route in memory_routes.router.routes}  # type: ignore[attr-defined]
        assert routes - ADMIN_PATHS == {
            *("/health", "/liveness", "/health_generate", "/ping", "/version", "/metrics"),
            *("/model_info", "/get_model_info", "/get_weight_version"),
            *("/generate", "/abort_request"),
            *("/v1/loads", "/get_load"),
            *("/open_session", "/close_session", "/list_sessions"),
            *("/fork_session", "/rollback_session"),
        }
        assert routes >= ADMIN_PATHS
        for headers in (client, admin):
            assert (await rig.http.get("/v1/models", headers=headers)).status_code == 200
