"""Serves folders of small files to browsers: a page, its style and its scripts.

Pages are public: they hold no data, and call the API with the key that the reader types.
"""

from pathlib import Path

from fastapi import Request, Response
from starlette.routing import Route

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
# A page loads its own files alone, runs no script within its text, and no other page frames it.
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",  # another version of the server may follow at this address
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes(folder: Path, path: str, page: str) -> list[Route]:
    """Routes of the file `page` at `path`, and of all others in `folder` below `path`.

    The files are read now, and each has a route of its own, so that no path leads out of the
    folder. Files of unknown types are left out.
    """
    below = path.rstrip("/")
    return [
        _route(path if file.name == page else f"{below}/{file.name}", file)
        for file in sorted(folder.iterdir())
        if file.suffix in _TYPES
    ]


def _route(path: str, file: Path) -> Route:
    content, media_type = file.read_bytes(), _TYPES[file.suffix]

    async def serve(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return Route(path, serve)
