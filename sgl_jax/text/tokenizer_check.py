"""Tries a tokenizer at the server's start, so that faults are found before the first request."""

import logging
from pathlib import Path

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.text.template_abilities import TemplateAbilities
from sgl_jax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SAMPLE = "Hello, world: 12 + 30 = 42."
_CONVERSATION = ({"role": "user", "content": _SAMPLE},)


def load_tokenizer(args: ServerArgs) -> Tokenizer:
    """Load and try the tokenizer of `args`. Raises ValueError if it cannot be used.

    A model without a tokenizer is served with token ids only, unless `args` name a tokenizer.
    """
    tokenizer = Tokenizer.load(args.tokenizer_folder, args.chat_template)
    if not tokenizer.can_encode:
        if args.tokenizer_path is not None or args.chat_template is not None:
            raise ValueError(f"there is no tokenizer in {args.tokenizer_folder!r}")
        logger.warning("no tokenizer in %r: prompts must be token ids", args.tokenizer_folder)
    check_tokenizer(tokenizer, args.tokenizer_folder, args.chat_template)
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, path: str, chat_template: str | None = None) -> None:
    """Encode and decode a text, and write a conversation with the chat template.

    Tokenizers without text and without a template pass. Raises ValueError, with the reason in one
    line and the files `path` and `chat_template`, if the tokenizer does not work.
    """
    if not tokenizer.can_encode:
        return
    _check_round_trip(tokenizer, path)
    if not tokenizer.chat_template:
        return
    template = _template_of(path, chat_template)
    # A template is probed by a worker, which bounds its time.
    text, parts = TemplateAbilities(), TemplateAbilities(content="parts")
    try:
        rendered = tokenizer.render_chat(_CONVERSATION, abilities=text)
    except InvalidRequestError as error:
        try:
            rendered = tokenizer.render_chat(_CONVERSATION, abilities=parts)
        except InvalidRequestError:
            raise ValueError(f"{template} does not work: {error}") from error
    if not rendered:
        raise ValueError(f"{template} writes an empty prompt")


def check_vocabulary(tokenizer: Tokenizer, path: str, vocab_size: int) -> None:
    """Raise ValueError if the tokenizer writes text with ids outside the model's vocabulary.

    Only the first and last token of a text and the tokens of a sample are checked, since tokens
    added after the vocabulary may be unused.
    """
    used = {"its eos token": tokenizer.eos_token_id, "its bos token": tokenizer.bos_token_id}
    if tokenizer.can_encode:
        used["a plain text"] = max(tokenizer.encode(_SAMPLE))
    for name, token in used.items():
        if token is not None and token >= vocab_size:
            raise ValueError(
                f"the tokenizer in {path!r} is not this model's: {name} has id {token}, outside "
                f"the vocabulary [0, {vocab_size}) of config.json"
            )


def _check_round_trip(tokenizer: Tokenizer, path: str) -> None:
    try:
        ids = tokenizer.encode(_SAMPLE)
        text = tokenizer.decode(ids)
        again = tokenizer.decode(tokenizer.encode(text)) if text else ""
    # Native code on files of unknown origin may raise any error.
    except Exception as error:
        raise ValueError(f"the tokenizer in {path!r} does not work: {error}") from error
    # Some tokenizers fold case or spaces: then the decoded text must at least be stable.
    if not ids or not text or (text != _SAMPLE and text != again):
        raise ValueError(
            f"the tokenizer in {path!r} does not give back what it encodes: {_SAMPLE!r} became "
            f"{len(ids)} tokens and {text!r}"
        )


def _template_of(path: str, chat_template: str | None) -> str:
    if chat_template is not None:
        return f"the chat template {chat_template!r}"
    files = [Path(path) / name for name in ("chat_template.jinja", "tokenizer_config.json")]
    here = next((file for file in files if file.is_file()), path)  # the first file counts
    return f"the chat template in {str(here)!r}"
