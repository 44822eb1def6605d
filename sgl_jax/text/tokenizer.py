"""Converts text to token ids and back, and chat messages to a prompt. Local files only.

Owns the Hugging Face tokenizer. Must never access the network, import jax, or change the text
except by the tokenizer (no clean-up of spaces, no added prompts).
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.surrogates import replace_in_text
from sgl_jax.text.call_arguments import PROBE_TOOLS, Messages, functions
from sgl_jax.text.kimi_tokenizer import is_kimi_tokenizer, load_kimi_tokenizer
from sgl_jax.text.template_abilities import TemplateAbilities

# A folder with any of these files has a tokenizer.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json", "tiktoken.model"),
)
_MAIN_FILE = "tokenizer.json"
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACE = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
# Returns a token's bytes, or b"" for an id outside the vocabulary.
TokenBytes = Callable[[int], bytes]


class Tokenizer:
    """A Hugging Face fast tokenizer with its chat template.

    Encoding and decoding call the Rust tokenizer directly: for the few tokens of a streamed chunk,
    the Python layers above it cost more than the work.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        # Text -> id of the tokens omitted by `skip_special_tokens`. The settings name only some of
        # them.
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self._added_tokens = {token.content: i for i, token in added.items()}
        self.special_ids = frozenset(self.special_tokens.values())
        fixed = token_bytes(self._backend)
        # True if every token stands for the same bytes in any context.
        self.has_fixed_bytes = fixed is not None
        self.token_bytes = cache(fixed or self._decoded_bytes)

    @classmethod
    def load(cls, path: str, chat_template: str | None = None) -> "Tokenizer":
        """Read the tokenizer in folder `path`. Without tokenizer files, it cannot encode text.

        Args:
            chat_template: file with a Jinja template that replaces the tokenizer's template.

        Raises:
            ValueError: no such folder, no fast tokenizer in it, or no such template file.
        """
        if not Path(path).is_dir():
            raise ValueError(f"no tokenizer folder at {path!r}")
        try:
            template = None
            if chat_template is not None:
                template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the chat template {chat_template}: {error}") from error
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        # Takes a second, so imported only when a tokenizer is loaded.
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            if is_kimi_tokenizer(Path(path)):
                hf_tokenizer = load_kimi_tokenizer(Path(path))
            elif any((Path(path) / name).exists() for name in _TOKENIZER_FILES):
                hf_tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            else:
                empty = tokenizers.Tokenizer(tokenizers.models.BPE())
                hf_tokenizer = PreTrainedTokenizerFast(tokenizer_object=empty)
            if not hf_tokenizer.is_fast:
                raise ValueError("it has no tokenizer.json")
            if template is not None:
                hf_tokenizer.chat_template = template
            return cls(hf_tokenizer)
        # The libraries raise errors of any type for a malformed file.
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            where = " or ".join(_files_at_fault(Path(path)))
            reason = f"{where}: {reason}" if where else reason
            raise ValueError(f"cannot read a tokenizer from {path!r}: {reason}") from error

    @property
    def vocab_size(self) -> int:
        """Return the number of the tokenizer's ids; the model's vocabulary may be padded."""
        return int(self._backend.get_vocab_size())

    @cached_property
    def can_encode(self) -> bool:
        """Return whether any token is text; False if it was loaded without files."""
        return any(i not in self.special_ids for i in self._backend.get_vocab().values())

    @property
    def chat_template(self) -> str:
        """Return the template, several joined by newlines; "" if there is none."""
        template = self._hf.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    @property
    def eos_token_id(self) -> int | None:
        return None if self._hf.eos_token_id is None else int(self._hf.eos_token_id)

    @property
    def bos_token_id(self) -> int | None:
        return None if self._hf.bos_token_id is None else int(self._hf.bos_token_id)

    @property
    def facts(self) -> dict[str, Any]:
        """Return class, special tokens and chat template, named as in `tokenizer_config.json`."""
        return {
            "tokenizer_class": type(self._hf).__name__,
            "vocab_size": self.vocab_size,
            **{name: str(token) for name, token in self._hf.special_tokens_map.items()},
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "chat_template": self._hf.chat_template,
        }

    @cached_property
    def longest_token_chars(self) -> int:
        """Return the length of the longest token, which bounds a text's tokens from below."""
        return max(map(len, self._backend.get_vocab()), default=1)

    def special_ids_of(self, texts: Set[str]) -> Mapping[str, int]:
        return {text: self.special_tokens[text] for text in texts & self.special_tokens.keys()}

    def added_ids_of(self, texts: Set[str]) -> Mapping[str, int]:
        """Return the ids of the texts that are tokens of their own, special or not."""
        return {text: self._added_tokens[text] for text in texts & self._added_tokens.keys()}

    def text_of(self, token_id: int) -> str:
        """Return the text of a token as the vocabulary has it; "" if there is none."""
        return self._backend.id_to_token(token_id) or ""

    def check_can_encode(self) -> None:
        """Raise `InvalidRequestError` if the tokenizer cannot encode text."""
        if not self.can_encode:
            raise InvalidRequestError(
                "this model has no tokenizer: send token ids (input_ids) instead of text", "text"
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids of `text`. Long texts take seconds, without the interpreter lock.

        Unpaired surrogates become U+FFFD. Raises `InvalidRequestError` if it cannot encode text.
        """
        self.check_can_encode()
        # Not `encode`, which keeps the GIL and computes unused offsets.
        encode = self._backend.encode_batch_fast
        try:
            (encoding,) = encode([text], add_special_tokens=add_special_tokens)
        except TypeError:  # the text has no UTF-8
            text = replace_in_text(text)
            (encoding,) = encode([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Ids outside the tokenizer's vocabulary have no text."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_args: Mapping[str, Any] | None = None,
        abilities: TemplateAbilities | None = None,
    ) -> str:
        """Return a conversation as the text that the model reads, including special tokens.

        Args:
            messages: `{"role": ..., "content": ...}` each, with a content in OpenAI's form: a
                string or a list of texts. Assistant messages may have `tool_calls` with arguments
                as text: the JSON of an object, or its beginning. `TemplateAbilities.render` adapts
                them to the template.
            tools: the callable tools, in OpenAI's form.
            continue_final_message: leave the last message open, to be continued.
            template_args: variables for the template, such as `enable_thinking`.
            abilities: the template's abilities; None: probe them once for this tokenizer.

        Raises:
            InvalidRequestError: there is no chat template, or it refuses these messages.
        """
        if not self.chat_template:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions, "
                "or start the server with --chat-template",
                "messages",
            )
        options = {
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        render = partial(self._render, options=options, template_args=template_args or {})
        return (abilities or self.abilities).render(messages, render)

    @cached_property
    def abilities(self) -> TemplateAbilities:
        def with_tools(messages: Messages) -> str:
            options = {"tools": [*PROBE_TOOLS], "add_generation_prompt": True}
            return self._render(messages, options, {})

        def render(messages: Messages) -> str:
            if any(functions(messages)):
                return with_tools(messages)
            return self._render(messages, {"tools": None, "add_generation_prompt": True}, {})

        return TemplateAbilities.of(render, with_tools)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        template_args: Mapping[str, Any],
    ) -> str:
        try:
            prompt: str = self._hf.apply_chat_template(
                list(messages),
                # Passed here, so that a client's template_args cannot supply a program.
                chat_template=None,
                documents=None,
                tokenize=False,
                **options,
                **template_args,
            )
        # A template is a program of the model's author that runs on the client's data: any
        # error means that it does not support these messages.
        except Exception as error:
            raise InvalidRequestError(
                f"the model's chat template refused the messages: {error}", "messages"
            ) from error
        return prompt

    def _decoded_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id], skip_special_tokens=False).encode()


def _files_at_fault(folder: Path) -> list[str]:
    """Return the names of files that may be at fault; empty if no file can be blamed."""
    settings = [name for name in _SETTINGS_FILES if (folder / name).is_file()]
    if not (folder / _MAIN_FILE).is_file():
        return []
    for name in (_MAIN_FILE, *settings):
        try:
            is_object = isinstance(json.loads((folder / name).read_text(encoding="utf-8")), dict)
        except (OSError, ValueError, RecursionError):
            is_object = False
        if not is_object:
            return [name]
    try:
        tokenizers.Tokenizer.from_file(str(folder / _MAIN_FILE))
    # The library has no type for its errors.
    except Exception:
        return [_MAIN_FILE]
    return settings


def token_bytes(tokenizer: tokenizers.Tokenizer) -> TokenBytes | None:
    """Return the function from a token id to bytes; None if bytes depend on neighboring tokens.

    There is a rule for each kind of tokenizer whose tokens stand for fixed bytes in any context:

    - byte-level BPE, and tiktoken files converted to it: a character for each byte;
    - SentencePiece, with or without byte fallback: U+2581 is a space, and with byte fallback
      `<0xNN>` is that byte.

    A decoder may remove the first space of a text. It stays here, since the prompt precedes the
    text.
    """
    decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level(tokenizer.id_to_token)
    if _are_pieces(steps):
        return _pieces(tokenizer.id_to_token, has_bytes="ByteFallback" in kinds)
    return None


def _are_pieces(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether these are the decoders of a SentencePiece model."""
    is_fused, has_spaces = False, False
    for step in steps:
        match step:
            case {"type": "Metaspace", "replacement": "\u2581"}:
                has_spaces = True
            case {"type": "Replace"} if step == _REPLACE:
                has_spaces = True
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "content": " ", "stop": 0} if is_fused:
                pass  # strips the whole text
            case {"type": "ByteFallback"}:
                pass
            case _:
                return False
    return has_spaces


def _byte_level(token_of: Callable[[int], str | None]) -> TokenBytes:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of_char = {char: byte for byte, char in bytes_to_unicode().items()}

    def read(token_id: int) -> bytes:
        token = token_of(token_id) or ""
        try:
            return bytes([byte_of_char[char] for char in token])
        except KeyError:  # an added token is plain text, not written in the byte alphabet
            return token.encode()

    return read


def _pieces(token_of: Callable[[int], str | None], *, has_bytes: bool) -> TokenBytes:
    def read(token_id: int) -> bytes:
        token = token_of(token_id) or ""
        byte = _BYTE.fullmatch(token) if has_bytes else None
        return token.replace(_SPACE, " ").encode() if byte is None else bytes.fromhex(byte[1])

    return read
