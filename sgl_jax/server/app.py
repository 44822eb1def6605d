"""Builds the HTTP application. Sockets and processes belong to `lifecycle`."""

from importlib import metadata
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.memory_view import MEMORY_PAGE
from sgl_jax.server.admin import call_routes, management, weight_routes
from sgl_jax.server.admin.openapi import install_openapi
from sgl_jax.server.answer_stream import CLAMPED_HEADER
from sgl_jax.server.apis import (
    chat,
    completions,
    embeddings,
    messages,
    native,
    openai,
    responses,
    scores,
    text,
)
from sgl_jax.server.apis.response_store import ResponseStore
from sgl_jax.server.errors import install_error_handlers
from sgl_jax.server.guards.bodies import BodyLimitMiddleware
from sgl_jax.server.guards.keys import ApiKeyMiddleware, ApiKeys
from sgl_jax.server.guards.origins import OriginMiddleware, allowed_origins
from sgl_jax.server.guards.request_ids import HEADER, RequestIdMiddleware
from sgl_jax.server.health_probe import HealthProbe
from sgl_jax.server.memory import memory_routes
from sgl_jax.server.memory.memory_watch import MemoryWatch
from sgl_jax.server.references import References
from sgl_jax.server.shared_reads import EngineReads
from sgl_jax.server.static_pages import page_routes

_PAGES = Path(__file__).parent / "pages"


def build_app(refs: References, keys: ApiKeys) -> FastAPI:
    """Return the application over `refs` for callers with one of `keys`. Starts nothing."""
    app = FastAPI(
        title="sgl_jax",
        version=metadata.version("sgl-jax"),
        description="Serves one language model: the APIs of OpenAI, Anthropic and SGLang.",
        redirect_slashes=False,
    )
    app.state.references = refs
    app.state.limits = refs.limits
    app.state.responses = ResponseStore(
        refs.limits.max_stored_responses, refs.limits.max_stored_response_bytes
    )
    app.state.engine_reads = EngineReads(refs)
    app.state.health_probe = HealthProbe(refs.frontend)
    app.state.memory_watch = MemoryWatch(refs)
    apis = (chat, completions, native, openai, text, scores, embeddings)
    own = (call_routes, management, weight_routes, memory_routes)
    routers = [module.router for module in (*apis, *own, responses, messages)]
    for router in (*routers, openai.other_models):
        # `include_router` would match a request against every route twice.
        app.router.routes.extend(router.routes)
    pages = [
        *page_routes(_PAGES, "/", "chat.html"),
        *page_routes(MEMORY_PAGE, "/memory", "index.html"),
    ]
    app.router.routes.extend(pages)
    install_error_handlers(app)
    # A request passes the middleware added last first.
    app.add_middleware(BodyLimitMiddleware, limits=refs.limits)
    public = {page.path for page in pages}
    app.add_middleware(OriginMiddleware, args=refs.args, public=public)
    if not keys.is_open:
        app.add_middleware(
            ApiKeyMiddleware, keys=keys, public=public, open_metrics=refs.args.open_metrics
        )
    app.add_middleware(
        RequestIdMiddleware,
        logs_access=not refs.args.disable_access_log,
        tracer=refs.frontend.tracer,
    )
    install_openapi(app, needs_key=not keys.is_open)
    return app


def with_cors(app: ASGIApp, args: ServerArgs) -> ASGIApp:
    """Serve `app` to pages of the origins in `--cors-allow-origins`, too.

    This is the outermost layer, so that a page can read every refusal.
    """
    origins = allowed_origins(args)
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["retry-after", HEADER, CLAMPED_HEADER],  # browsers always show some more
    )
