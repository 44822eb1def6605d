"""No page of another site drives or reads a server that needs no key."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from sgl_jax.core.command_line import parse_server_args
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.server.app import build_app
from sgl_jax.server.guards.keys import ApiKeys
from sgl_jax.server.guards.origins import warn_if_exposed
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import Rig, serving
from tests.server.server_process import SCRIPTED, running_server

pytestmark = pytest.mark.anyio

EVIL = "http://evil.example"
ORIGIN = {"origin": EVIL}
CROSS_SITE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
FORBIDDEN = 403
STATE_CALLS = ("/pause_generation", "/start_profile", "/flush_cache", "/save_cache")
EXPERT_ROUTES = tuple(f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump"))
OPEN = {"/health", "/liveness", "/ping"}  # of load balancers, which call any name


def routes_of(rig: Rig) -> list[tuple[str, str]]:
    """Method and path of each route of the API, with values in place of parameters."""
    app = build_app(rig.refs, ApiKeys.from_args(rig.refs.args))
    return [
        (method, route.path.replace("{", "").replace("}", "").replace(":path", ""))
        for route in app.routes
        if isinstance(route, APIRoute) and route.path not in OPEN
        for method in route.methods or ()
    ]


def local(**headers: Any) -> dict[str, str]:
    return {"host": "127.0.0.1:30000", **{k.replace("_", "-"): v for k, v in headers.items()}}


@pytest.mark.parametrize("path", STATE_CALLS)
async def test_a_page_of_another_site_changes_no_state(
    path: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer) as rig:
        before = len(rig.engine.seen)
        for headers in (ORIGIN, CROSS_SITE, {"origin": "null"}, {"host": "evil.example"}):
            assert (await rig.http.post(path, headers=headers)).status_code == FORBIDDEN
        assert len(rig.engine.seen) == before


@pytest.mark.parametrize(
    "headers",
    [
        ORIGIN,
        CROSS_SITE,
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
        {"host": "evil.example", "origin": EVIL, "sec-fetch-site": "same-origin"},
        {"host": "evil.example:30000"},
        {"upgrade": "websocket", "connection": "upgrade", **ORIGIN},
    ],
)
async def test_every_route_refuses_pages_of_other_sites(
    headers: Mapping[str, str], model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer) as rig:
        routes = routes_of(rig)
        assert len(routes) > 40
        for method, path in routes:
            answer = await rig.http.request(method, path, headers=headers)
            assert answer.status_code == FORBIDDEN, (method, path)
            if not path.startswith("/v1/messages") and method != "HEAD":
                assert answer.json()["error"]["code"] == "origin_refused"
        for path in ("/openapi.json", "/docs", "/none"):
            assert (await rig.http.get(path, headers=headers)).status_code == FORBIDDEN


@pytest.mark.parametrize(
    "headers",
    [
        ORIGIN,
        CROSS_SITE,
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
        {"sec-fetch-mode": "navigate"},
        {"origin": "http://127.0.0.1:30000"},
        # Browsers send no Sec-Fetch-Site to an address that is neither a loopback nor HTTPS.
        {"host": "10.0.0.5:30000", "user-agent": "Mozilla/5.0 (X11; Linux x86_64)"},
    ],
)
async def test_a_get_of_a_browser_flushes_nothing(
    headers: Mapping[str, str], model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer) as rig:
        answer = await rig.http.get("/flush_cache", headers={**local(), **headers})
        assert answer.status_code == FORBIDDEN
        tool = await rig.http.get("/flush_cache", headers={"user-agent": "python-requests/2.32"})
        assert tool.status_code == 200
        assert (await rig.http.post("/flush_cache")).status_code == 200


@pytest.mark.parametrize("path", EXPERT_ROUTES)
async def test_records_of_experts_need_a_post(
    path: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer) as rig:
        assert (await rig.http.get(path)).status_code == 405


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://127.0.0.1:30000"},
        {"origin": "http://127.0.0.1:30000", "sec-fetch-site": "same-origin"},
        {"host": "localhost:30000", "origin": "http://localhost:30000"},
        {"host": "[::1]:30000", "origin": "http://[::1]:30000"},
        {"host": "10.0.0.5", "origin": "http://10.0.0.5"},
        {"host": "10.0.0.5:80", "origin": "http://10.0.0.5"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ],
)
async def test_own_pages_and_programs_are_served(
    headers: Mapping[str, str], model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer) as rig:
        sent = {**local(), **headers}
        assert (await rig.http.get("/v1/models", headers=sent)).status_code == 200
        body = {"prompt": "a", "max_tokens": 1}
        answer = await rig.http.post("/v1/completions", json=body, headers=sent)
        assert answer.status_code == 200
        answer = await rig.http.post("/pause_generation", headers=sent)
        assert answer.status_code == 200


async def test_probes_and_links_to_the_pages_pass(model_folder: Path, tokenizer: Tokenizer) -> None:
    """Neither shows data; a page that was rebound gets none either, since its calls are refused."""
    async with serving(model_folder, tokenizer) as rig:
        for path in (*sorted(OPEN), "/", "/memory", "/chat.js"):
            for headers in ({"host": "lb.example"}, CROSS_SITE, ORIGIN):
                assert (await rig.http.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("flags", "host", "is_served"),
    [
        ([], "127.0.0.1", True),
        ([], "2130706433", False),  # no browser sends an address like this
        ([], "localhost.", True),
        ([], "app.localhost:80", True),
        ([], "sgl-jax", False),  # the loopback has no names of a network
        ([], "evil.local", False),
        ([], "localhost.evil.example", False),
        ([], "127.0.0.1.evil.example", False),
        ([], "", False),
        ([], ".", False),
        ([], "[::1", False),
        ([], "user@localhost", False),
        (["--host", "0.0.0.0"], "10.1.2.3:30000", True),
        (["--host", "0.0.0.0"], "sgl-jax", True),
        (["--host", "::"], "sgl-jax.default.svc", True),
        (["--host", "0.0.0.0"], "sgl-jax.default.svc.cluster.local:80", True),
        (["--host", "0.0.0.0"], "host.docker.internal:30000", True),
        (["--host", "0.0.0.0"], "sgl-jax.prod", False),  # .prod is in public DNS
        (["--host", "0.0.0.0"], "evil.example", False),
        (["--host", "gpu1.corp.example"], "gpu1.corp.example:30000", True),
        (["--host", "gpu1.corp.example"], "gpu2.corp.example", False),
        (["--allowed-hosts", "llm.example,*.corp.example"], "LLM.example", True),
        (["--allowed-hosts", "llm.example, *.corp.example"], "gpu2.corp.example", True),
        (["--allowed-hosts", "llm.example,*.corp.example"], "corp.example", False),
        (["--allowed-hosts", "llm.example"], "localhost", True),
        (["--allowed-hosts", "*"], "evil.example", True),
    ],
)
async def test_names_that_a_page_could_point_at_this_server_are_refused(
    flags: list[str], host: str, is_served: bool, model_folder: Path, tokenizer: Tokenizer
) -> None:
    args = parse_server_args(["--model-path", "m", *flags], {})
    settings: dict[str, Any] = {"host": args.host, "allowed_hosts": args.allowed_hosts}
    async with serving(model_folder, tokenizer, **settings) as rig:
        answer = await rig.http.get("/v1/models", headers={"host": host})
        assert answer.status_code == (200 if is_served else FORBIDDEN)


@pytest.mark.parametrize(
    "names", ["http://llm.example", "llm.example:80", "a b", "", "a,,b", "*.*", "a*"]
)
def test_a_wrong_list_of_names_is_refused(names: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_server_args(["--model-path", "m", "--allowed-hosts", names], {})
    assert "--allowed-hosts" in capsys.readouterr().err


async def test_every_host_header_counts(model_folder: Path, tokenizer: Tokenizer) -> None:
    async with serving(model_folder, tokenizer) as rig:
        twice = httpx.Headers([("host", "localhost"), ("host", "evil.example")])
        assert (await rig.http.get("/v1/models", headers=twice)).status_code == FORBIDDEN
        twice = httpx.Headers([("origin", "http://localhost"), ("origin", EVIL)])
        assert (await rig.http.get("/v1/models", headers=twice)).status_code == FORBIDDEN


@pytest.mark.parametrize("origins", ["*", f"https://other.example, {EVIL}"])
async def test_origins_that_the_operator_names_are_served(
    origins: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer, cors_allow_origins=origins) as rig:
        headers = ORIGIN | {"sec-fetch-site": "cross-site"}
        answer = await rig.http.post("/pause_generation", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] in ("*", EVIL)
        # Nor then does a GET of a browser change state.
        assert (await rig.http.get("/flush_cache", headers=headers)).status_code == FORBIDDEN


async def test_a_key_is_enough_and_needs_no_host(model_folder: Path, tokenizer: Tokenizer) -> None:
    async with serving(model_folder, tokenizer, api_key="hush") as rig:
        headers = ORIGIN | {"host": "llm.example", "authorization": "Bearer hush"}
        assert (await rig.http.get("/v1/models", headers=headers)).status_code == 200
        del headers["authorization"]
        assert (await rig.http.get("/v1/models", headers=headers)).status_code == 401


async def test_with_an_admin_key_alone_clients_are_guarded(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer, admin_api_key="root") as rig:
        headers = ORIGIN | {"host": "llm.example"}
        assert (await rig.http.get("/v1/models", headers=headers)).status_code == FORBIDDEN
        headers["authorization"] = "Bearer root"
        assert (await rig.http.get("/v1/models", headers=headers)).status_code == 200


async def test_metrics_may_be_open_to_scrapers_without_a_key(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer, api_key="hush") as rig:
        assert (await rig.http.get("/metrics")).status_code == 401
    async with serving(model_folder, tokenizer, api_key="hush", open_metrics=True) as rig:
        assert (await rig.http.get("/metrics", headers={"host": "10.1.2.3"})).status_code == 200
        assert (await rig.http.get("/metrics", headers=ORIGIN)).status_code == FORBIDDEN
        assert (await rig.http.get("/v1/models")).status_code == 401


@pytest.mark.parametrize(
    ("host", "settings", "is_warned"),
    [
        ("0.0.0.0", {}, True),
        ("::", {}, True),
        ("10.0.0.5", {}, True),
        ("gpu1.corp.example", {}, True),
        ("127.0.0.1", {}, False),
        ("127.0.0.2", {}, False),
        ("::1", {}, False),
        ("localhost", {}, False),
        ("0.0.0.0", {"api_key": "hush"}, False),
    ],
)
def test_a_server_for_everybody_is_warned_of(
    host: str, settings: dict[str, Any], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    args = ServerArgs(host=host, **settings)
    warn_if_exposed(args, ApiKeys.from_args(args))
    assert ("NO API KEY" in caplog.text) == is_warned


@pytest.mark.long
def test_a_server_process_warns_before_it_is_ready(model_folder: Path) -> None:
    with running_server(SCRIPTED, model_folder, "--host", "0.0.0.0") as server:
        server.wait_ready()
        assert [line for line in server.printed if "NO API KEY" in line]
        port = httpx.URL(server.url).port
        headers = {"host": "evil.example"}
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers)
        assert answer.status_code == FORBIDDEN
