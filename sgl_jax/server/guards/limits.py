"""The limits on one client's requests to the server, as named numbers.

docs/guide/limits.md lists them, next to the limits of `core/` that no server changes. Each bounds
memory or time spent before the engine receives a request. Clients without a key can take at most
their sum: connections times the bytes that each may send before its key is checked.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from sgl_jax.core.server_args import ServerArgs

MAX_FIELDS = 256  # in an object with fixed fields
_MIB = 2**20
_MOST_BYTES_PER_CHAR = 6  # a character as \uXXXX
_LONG_BODY_PATHS = frozenset(
    {
        *("/generate", "/v1/completions", "/tokenize", "/detokenize", "/score", "/v1/score"),
        "/score_tokens",
        *("/v1/embeddings", "/embeddings", "/v1/rerank", "/v2/rerank", "/rerank"),
    }
)
_CHAT_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"}
)


def _limit(default: Any, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Limits:
    """Limits of one server. `max_prompt_chars` and `max_chat_body_bytes` depend on the model."""

    # Connections and requests, before the key is checked
    max_connections: int = _limit(
        ServerArgs.max_connections,
        "open connections; with more, the one is closed that has waited longest for a request, or "
        "if all have one, the newest (503)",
    )
    max_pipelined_requests: int = _limit(
        32, "requests sent ahead on a connection; with one more it is closed"
    )
    max_url_bytes: int = _limit(8192, "bytes of a request's URL (414)")
    max_head_bytes: int = _limit(
        65_536, "bytes of URL and headers together, and of the framing of a chunked body (431)"
    )
    receive_timeout_s: float = _limit(
        ServerArgs.receive_timeout,
        "seconds from a request's first byte to its last, and before a connection's first (408)",
    )
    keep_alive_timeout_s: float = _limit(
        ServerArgs.keep_alive_timeout,
        "seconds without a request after which a connection is closed",
    )

    # Bodies, after the key is checked
    max_body_bytes: int = _limit(
        ServerArgs.max_body_bytes,
        "bytes of a body of `/generate`, `/v1/completions`, `/v1/embeddings`, `/v1/rerank`, "
        "`/v1/score`, `/score_tokens`, `/tokenize` and `/detokenize` (413)",
    )
    max_chat_body_bytes: int = _limit(
        ServerArgs.max_body_bytes,
        "bytes of a body of `/v1/chat/completions`, `/v1/responses` and `/v1/messages` (413): 1 "
        "MiB and 6 for each of `max_prompt_chars`, at most `max_body_bytes`; if the model takes "
        "images, `max_body_bytes`",
    )
    max_weight_body_bytes: int = _limit(
        128 * _MIB, "bytes of a body of `/update_weights_from_tensor` (413)"
    )
    max_control_body_bytes: int = _limit(65_536, "bytes of a body of any other route (413)")
    max_held_body_bytes: int = _limit(
        256 * _MIB, "bytes of the bodies of all requests in progress (503), and of one (413)"
    )
    max_json_depth: int = _limit(64, "objects and lists within each other (400)")
    max_json_values: int = _limit(2**20, "values in a body, each token id being one (400)")
    max_json_keys: int = _limit(2**17, "keys, lists and objects in a body (400)")

    # Prompts
    max_prompt_chars: int = _limit(
        _MIB,
        "characters of a prompt, before and after the chat template (400): 65,536 and 16 for each "
        "token that a request may have",
    )
    max_image_bytes: int = _limit(20 * _MIB, "bytes of an image's file (400)")
    max_image_pixels: int = _limit(
        64_000_000, "pixels of an image, by the header of its file, before it is decoded (400)"
    )
    image_timeout_s: float = _limit(
        10.0, "seconds to decode and resize an image (503), and to fetch it (400)"
    )
    max_stored_responses: int = _limit(
        1024,
        "responses that are kept for later requests; with more, the oldest of the key with most "
        "goes",
    )
    max_stored_response_bytes: int = _limit(
        64 * _MIB, "bytes of these; with more, the oldest of the key with most bytes goes"
    )
    text_timeout_s: float = _limit(
        10.0,
        "seconds to apply a chat template and tokenise, and as many again for each MiB of text "
        "(503)",
    )

    @classmethod
    def of(
        cls, args: ServerArgs, max_prompt_chars: int = _MIB, *, takes_images: bool = False
    ) -> "Limits":
        """Return the limits of a server with these settings, for a model with this prompt limit.

        Limits of connections are the same for every model.
        """
        chat_bytes = _MIB + _MOST_BYTES_PER_CHAR * max_prompt_chars
        return cls(
            max_connections=args.max_connections,
            receive_timeout_s=args.receive_timeout,
            keep_alive_timeout_s=args.keep_alive_timeout,
            max_body_bytes=args.max_body_bytes,
            max_chat_body_bytes=args.max_body_bytes
            if takes_images
            else min(args.max_body_bytes, chat_bytes),
            max_control_body_bytes=min(args.max_body_bytes, cls.max_control_body_bytes),
            max_prompt_chars=max_prompt_chars,
        )

    def body_bytes_of(self, path: str) -> int:
        most = self.max_control_body_bytes
        if path in _LONG_BODY_PATHS:
            most = self.max_body_bytes
        elif path in _CHAT_PATHS:
            most = self.max_chat_body_bytes
        elif path == "/update_weights_from_tensor":
            most = self.max_weight_body_bytes
        return min(most, self.max_held_body_bytes)

    def text_seconds(self, num_chars: int) -> float:
        return self.text_timeout_s * (1 + num_chars / _MIB)
