"""A client learns what was wrong with any body it sends, and nothing breaks."""

from pathlib import Path

import pytest

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import serving
from tests.server.malformed_bodies import MALFORMED

pytestmark = pytest.mark.anyio


def test_names_are_unique() -> None:
    assert len({case.name for case in MALFORMED}) == len(MALFORMED)


async def test_each_malformed_body_gets_its_answer(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    wrong = {}
    async with serving(model_folder, tokenizer) as rig:
        for case in MALFORMED:
            headers = {"content-type": case.content_type} if case.content_type else {}
            answer = await rig.http.post(case.path, content=case.body, headers=headers)
            error = answer.json()["error"] if answer.status_code >= 400 else {}
            got = (answer.status_code, error.get("param"))
            if got != (case.status, case.param) or set(error) != {
                "message",
                "type",
                "param",
                "code",
            }:
                wrong[case.name] = (got, (case.status, case.param), error)
            assert len(answer.content) < 2000, f"{case.name}: an answer that repeats the question"
        assert wrong == {}
        # Nothing of it reached the engine, but for grammars that it refused.
        sent = [m for m in rig.engine.seen if isinstance(m, GenerateRequest)]
        assert rig.engine.seen == sent
        assert [m for m in sent if m.sampling.grammar is None] == []
        healthy = await rig.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        assert healthy.status_code == 200
