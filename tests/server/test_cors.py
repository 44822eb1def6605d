"""Pages of other origins may call the server only where the operator says so."""

from pathlib import Path
from typing import Any

import pytest

from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import serving

pytestmark = pytest.mark.anyio

ORIGIN = "https://page.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
ALLOWED = "access-control-allow-origin"


async def test_by_default_no_page_is_let_in(model_folder: Path, tokenizer: Tokenizer) -> None:
    async with serving(model_folder, tokenizer) as rig:
        answer = await rig.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status_code == 403
        answer = await rig.http.get("/v1/models", headers={"origin": ORIGIN})
        assert ALLOWED not in answer.headers


@pytest.mark.parametrize("origins", ["*", f"https://other.example, {ORIGIN}"])
async def test_a_page_that_is_let_in_may_ask_with_a_key(
    origins: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    settings: dict[str, Any] = {"cors_allow_origins": origins, "api_key": "hush"}
    async with serving(model_folder, tokenizer, **settings) as rig:
        answer = await rig.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers[ALLOWED] in ("*", ORIGIN)
        allowed = answer.headers["access-control-allow-headers"].lower()
        assert "x-stainless-os" in allowed
        assert "authorization" in allowed

        headers = {"origin": ORIGIN, "authorization": "Bearer hush"}
        body = {"prompt": "hi", "max_tokens": 2, "stream": True}
        answer = await rig.http.post("/v1/completions", json=body, headers=headers)
        assert answer.headers[ALLOWED] in ("*", ORIGIN)
        assert answer.text.endswith("data: [DONE]\n\n")
        # A page can read why it was refused.
        for refused in ({"origin": ORIGIN}, headers):
            answer = await rig.http.post("/v1/completions", json={}, headers=refused)
            assert answer.status_code in (400, 401)
            assert answer.headers[ALLOWED] in ("*", ORIGIN)


async def test_other_pages_are_not_let_in(model_folder: Path, tokenizer: Tokenizer) -> None:
    settings: dict[str, Any] = {"cors_allow_origins": "https://other.example"}
    async with serving(model_folder, tokenizer, **settings) as rig:
        answer = await rig.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status_code == 400
        assert ALLOWED not in answer.headers
