"""Pages that the server brings along: a folder of plain files, none of which holds any data.

Nothing outside the server is loaded, and no script in a text of a model can run: a strict
Content-Security-Policy allows the server's own scripts, styles and images alone.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # a newer server brings newer files
}


def page_routes(folder: Path, path: str) -> list[Route]:
    """Routes of the files in `folder`: its index at `path`, every other file below it.

    The files are read once. Those of unknown types are left out.
    """
    files = {file.name: file for file in folder.iterdir() if file.suffix in _TYPES}
    routes = [_route(path, files.pop(INDEX))]
    below = path.rstrip("/")
    return routes + [_route(f"{below}/{name}", file) for name, file in sorted(files.items())]


def _route(path: str, file: Path) -> Route:
    content, media_type = file.read_bytes(), _TYPES[file.suffix]

    async def send_file(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return Route(path, send_file, include_in_schema=False)
