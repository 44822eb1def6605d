"""Pages for browsers: public, of known types, under a strict policy, and nothing beside them."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from sgl_jax.server.static_pages import page_routes
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import serving

pytestmark = pytest.mark.anyio


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A folder of files at `/view`, with a secret beside it."""
    folder = tmp_path / "page"
    folder.mkdir()
    for name in ("view.html", "view.css", "view.js", "view.py"):
        (folder / name).write_text(name)
    (tmp_path / "secret.html").write_text("secret")
    app = Starlette(routes=page_routes(folder, "/view", "view.html"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "content", "media_type"),
    [
        ("/view", "view.html", "text/html; charset=utf-8"),
        ("/view/view.css", "view.css", "text/css; charset=utf-8"),
        ("/view/view.js", "view.js", "text/javascript; charset=utf-8"),
    ],
)
async def test_the_files_of_a_folder_have_their_types_and_a_strict_policy(
    http: httpx.AsyncClient, path: str, content: str, media_type: str
) -> None:
    answer = await http.get(path)
    assert (answer.status_code, answer.text) == (200, content)
    assert answer.headers["content-type"] == media_type
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    assert (await http.head(path)).status_code == 200
    assert (await http.post(path)).status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/view/view.html",
        "/view/view.py",
        "/view/other.js",
        "/view/../secret.html",
        "/view/%2e%2e/secret.html",
        "/view/..%2fsecret.html",
        "/secret.html",
    ],
)
async def test_nothing_else_is_served(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 404


async def test_pages_need_no_key_and_all_else_does(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer, api_key="hush") as rig:
        page = await rig.http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "content-security-policy" in page.headers
        for path in ("/v1/models", "/metrics", "/chat.html", "/pages/chat.js", "/nothing"):
            assert (await rig.http.get(path)).status_code == 401


async def test_the_page_loads_nothing_from_elsewhere(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with serving(model_folder, tokenizer) as rig:
        page = await rig.http.get("/")
        files = re.findall(r'(?:src|href)="(/[^"]+\.\w+)"', page.text)
        assert sorted(files) == ["/chat.css", "/chat.js"]
        for name in (*files, "/token_chart.js"):
            assert (await rig.http.get(name)).status_code == 200
        assert "<script>" not in page.text
        assert "style=" not in page.text
        assert "http" not in page.text
