"""The one way to answer a conversation, whatever API it came by."""

from collections.abc import Mapping

from fastapi import Request, Response

from sgl_jax.core.messages import SessionTurn
from sgl_jax.server.context import context_of
from sgl_jax.server.generation import AnswerFormat, prepare_all, respond
from sgl_jax.server.openai_protocol import ChatRequest
from sgl_jax.server.session_owner import owner_of
from sgl_jax.server.tenants import tenant_of


async def answer_chat(
    request: Request, chat: ChatRequest, answer_format: AnswerFormat, names: Mapping[str, str]
) -> Response:
    """Run `chat`, which is `request` as a chat, and answer in `answer_format`.

    Errors name fields by `names`, as for `client_names`.
    """
    context = context_of(request)
    context.check_open()
    context.check_model(chat.model)
    context.check_tools(chat)
    turn = None if chat.session_id is None else SessionTurn(id=chat.session_id, is_whole=True)
    grammar = context.call_grammar(chat)
    names = {**names, **dict.fromkeys(grammar, "tools")}
    options = chat.options_of(1)
    tenant = tenant_of(request, chat.user)
    session = owner_of(request, tenant).own(turn)
    requests = await prepare_all(
        request,
        names,
        context.encode_chat(request, chat),
        [chat],
        options,
        return_logprob=bool(chat.logprobs),
        top_logprobs_num=chat.top_logprobs or 0,
        grammar=grammar,
        reasoning_after=context.reasoning_after,
        session=session,
        tenant=tenant,
    )
    return await respond(
        request,
        requests,
        answer_format,
        streaming=chat.stream,
        names=names,
        kept_tokens=context.parsed_tokens(chat),
    )
