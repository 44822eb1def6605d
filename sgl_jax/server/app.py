"""Puts the HTTP application together. No sockets, no processes: those are `lifecycle`'s."""

from importlib import metadata

from fastapi import FastAPI
from msgspec.inspect import is_struct_type

from sgl_jax.core.calls import CALLS
from sgl_jax.server import (
    call_routes,
    load_routes,
    management_routes,
    messages_routes,
    native_routes,
    openai_routes,
    other_model_routes,
    responses_routes,
    score_routes,
    text_routes,
)
from sgl_jax.server.api_keys import ApiKeys
from sgl_jax.server.context import ServerContext
from sgl_jax.server.errors import MessagesError, install_error_handlers
from sgl_jax.server.messages_format import InputTokens, MessageObject
from sgl_jax.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware
from sgl_jax.server.native_protocol import Generated
from sgl_jax.server.openai_responses import ChatCompletion, Completion, ModelCard, ModelList
from sgl_jax.server.openapi import install_openapi
from sgl_jax.server.responses_format import ResponseObject
from sgl_jax.server.score_protocol import Scores
from sgl_jax.server.text_protocol import Detokenized, Tokenized


def build_app(context: ServerContext, keys: ApiKeys) -> FastAPI:
    """The application over `context`, for callers with one of `keys`; nothing is started."""
    app = FastAPI(
        title="sgl_jax",
        version=metadata.version("sgl-jax"),
        description="Serves one language model: the APIs of OpenAI, Anthropic and SGLang.",
        redirect_slashes=False,
    )
    app.state.context = context
    for routes in (
        *(openai_routes, native_routes, call_routes, management_routes),
        *(load_routes, text_routes, score_routes, other_model_routes, responses_routes),
        messages_routes,
    ):
        # Not `include_router`: a request would be matched with every route twice.
        app.router.routes.extend(routes.router.routes)
    install_error_handlers(app, {call.route: call.methods for call in CALLS if call.route})
    # The last one is the first that a request passes.
    app.add_middleware(BodyLimitMiddleware, limits=context.limits)
    if not keys.is_open:
        app.add_middleware(ApiKeyMiddleware, keys=keys)
    structs: list[type] = [
        *(
            ChatCompletion,
            Completion,
            ModelCard,
            ModelList,
            Generated,
            Tokenized,
            Detokenized,
            Scores,
            ResponseObject,
            responses_routes.Deleted,
            responses_routes.ItemList,
            MessageObject,
            InputTokens,
            MessagesError,
        ),
        *(call.answer for call in CALLS if is_struct_type(call.answer)),
    ]
    install_openapi(app, structs, needs_key=not keys.is_open)
    return app
