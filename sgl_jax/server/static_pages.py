"""Serves folders of small files to browsers: a page, its style and its scripts.

Pages are public: they hold no data, and call the API with the key that the user types.
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
# A page loads only files from here, runs no inline scripts, and cannot be framed by another page.
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
    """Return a route of `page` at `path`, and routes of the other files in `folder` below `path`.

    Files are read now and each has a separate route, so that no path leads out of the folder. Files
    of unknown types are left out.
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
