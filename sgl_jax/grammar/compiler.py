"""Compiles grammars for a model's vocabulary, and follows outputs by them.

The limits of a grammar count llguidance's work, not seconds, so that every machine accepts the same
grammars.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import (
    JSON_RULE,
    Grammar,
    GrammarKind,
    SpecialIds,
    lark_literal,
    opened,
    split_special,
    styled,
)
from sgl_jax.core.step_plan import Int32Array, mask_words

logger = logging.getLogger(__name__)

_FREE_TEXT = r"(.|\n)*"
# Occurs only in Lark grammars. Rules may begin with ? or !.
_LARK = re.compile(r"^\s*(%llguidance\b|[?!]?start\s*:)", re.MULTILINE)
# In llguidance's message, the line at fault has a caret below it.
_FAULT_OF_JSON = re.compile(rf"\n +\d+ \| {JSON_RULE}: .*\n +\^")
_AROUND_FAULT = re.compile(r"^at [^:]*: (?:failed to compile JSON schema: )?|\n +\d+ \| ")
# Schemas of MAX_GRAMMAR_CHARS compile within about 0.3 s. If a grammar is so ambiguous that a token
# takes more than about 0.05 s, its request ends; a token of a schema takes microseconds.
_LIMITS = LLParserLimits(max_items_in_row=500, step_max_items=2_000)


class RowGrammar:
    """Follows the tokens of an output, and masks the possible next tokens.

    It reads each token once. A retract changes nothing, because the output keeps its tokens.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._num_read = 0
        self._end: Int32Array = np.zeros(mask_words(vocab_size), np.int32)
        ids = np.array(eos_token_ids, np.int64)
        np.bitwise_or.at(
            self._end.view(np.uint32), ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32)
        )

    @property
    def error(self) -> str:
        """Return the reason for a failed grammar, a forbidden token or its cost; "" if none."""
        # The rest of llguidance's message holds the output.
        message: str = self._matcher.get_error()
        return message.partition("\n")[0]

    def read(self, output: Int32Array) -> None:
        """Read the new tokens of `output`, int32[n], the whole output so far."""
        fresh = output[self._num_read :].tolist()
        self._num_read = len(output)
        if fresh:
            self._matcher.consume_tokens(fresh)

    def masks(self, drafts: Sequence[int], masks: Int32Array) -> None:
        """Write the tokens allowed next, and after each draft, to `masks`.

        `masks` is int32[1 + len(drafts), mask_words(vocab_size)]. If no token may follow, a mask
        holds the end tokens. Nothing is written after a draft that the grammar forbids.
        """
        num_tried = 0
        for place in range(1 + len(drafts)):
            self._write_mask(masks[place])
            if place == len(drafts) or self._matcher.is_stopped():
                break
            if not self._matcher.try_consume_tokens([drafts[place]]):
                break
            num_tried += 1
        if num_tried:
            self._matcher.rollback(num_tried)

    def expected(self) -> list[int]:
        """Return the next tokens, as far as the grammar forces them."""
        if self._matcher.is_stopped():
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def _write_mask(self, mask: Int32Array) -> None:
        if not self._matcher.is_stopped():  # also True after an error
            fill_next_token_bitmask(self._matcher, mask[None], 0)
        if self._matcher.is_stopped():
            mask[:] = self._end


class GrammarCompiler:
    """Compiles the grammars of one model.

    Args:
        tokenizer_path: folder with a `tokenizer.json`. It is read at once, because llguidance keeps
            the interpreter lock while reading: a second or more for a large vocabulary.
        vocab_size: the model's vocabulary size, at least the tokenizer's.
        eos_token_ids: ids of the tokens that end an output.
        opens_objects: an object of a schema may have undeclared properties.
    """

    def __init__(
        self,
        tokenizer_path: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        opens_objects: bool = False,
    ) -> None:
        self._file = Path(tokenizer_path) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._opens_objects = opens_objects
        self._tokenizer: LLTokenizer | None = None
        self._problem = ""  # the reason for a missing tokenizer
        self._read_tokenizer()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar and its first mask, which may take longer than all later masks.

        Most of it runs without the interpreter lock. Raises `InvalidRequestError` if the grammar is
        malformed or too expensive.
        """
        if self._tokenizer is None:
            raise InvalidRequestError(f"{grammar.kind}: {self._problem}", grammar.kind)
        try:
            text = self._converted(grammar.kind, grammar.text)
        except Exception as error:  # the type depends on the reader
            raise _refusal(grammar.kind, str(error)) from error
        if grammar.reasoning is not None:
            opening, closing = (lark_literal(m, self._special_ids) for m in grammar.reasoning)
            text = _after_reasoning(text, opening, closing)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        if not matcher.is_error():  # copies of the matcher contain this mask
            mask = np.empty((1, mask_words(self._vocab_size)), np.int32)
            fill_next_token_bitmask(matcher, mask, 0)
        if matcher.is_error():
            raise _refusal(grammar.kind, matcher.get_error())
        return matcher

    def _converted(self, kind: GrammarKind, text: str) -> str:
        """Return a grammar in llguidance's form. Raises an error of any type if it is malformed."""
        converted: str
        match kind:
            case "json_schema":
                schema = json.loads(text)
                if not isinstance(schema, dict):
                    raise ValueError(f"a schema is a JSON object, got {type(schema).__name__}")
                converted = LLMatcher.grammar_from_json_schema(self._prepared(schema))
            case "regex":
                converted = LLMatcher.grammar_from_regex(text)
            case "ebnf":
                lark = text if _LARK.search(text) else gbnf_to_lark(text)
                converted = LLMatcher.grammar_from_lark(lark)
            case "structural_tag":
                converted = structural_tag(text, self._prepared, self._special_ids)
        return converted

    def follow(self, matcher: LLMatcher) -> RowGrammar:
        return RowGrammar(matcher.deep_copy(), self._vocab_size, self._eos_token_ids)

    def _read_tokenizer(self) -> None:
        if not self._file.is_file() or not self._eos_token_ids:
            lacking = "end-of-sequence token" if self._file.is_file() else "tokenizer.json"
            self._problem = f"this model has no {lacking}, which grammars need"
            return
        eos = list(self._eos_token_ids)
        try:
            self._tokenizer = LLTokenizer(str(self._file), n_vocab=self._vocab_size, eos_token=eos)
        except Exception as error:  # of any type; requests without a grammar can be served
            logger.warning("grammars cannot be served: %s", error)
            self._problem = f"this model's tokenizer cannot be used for grammars: {error}"

    def _prepared(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return styled(opened(schema) if self._opens_objects else schema)

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        added = json.loads(self._file.read_text("utf-8")).get("added_tokens") or []
        return {token["content"]: token["id"] for token in added if token.get("special")}


def _after_reasoning(grammar: str, opening: str, closing: str) -> str:
    """Return a grammar of reasoning, which is free text up to `closing`, followed by `grammar`.

    The reasoning is optional and begins with `opening`. If `opening` is the empty text, the
    reasoning has begun in the prompt. Both are Lark literals.
    """
    answer: dict[str, Any] = {"lark_grammar": grammar}
    if grammar.lstrip().startswith("{"):
        (answer,) = json.loads(grammar)["grammars"]
    if closing.startswith("<["):  # a token, not text
        thought = f"thought: /(?s:.*)/ {closing}"
    else:
        thought = f"thought[suffix={closing}]: /(?s:.*)/"
    reasoning = "thought SPACES" if opening == '""' else f"({opening} thought SPACES)?"
    lines = [f"start: {reasoning} @answer", thought, r"SPACES: /[ \n]{0,4}/"]
    first = {"lark_grammar": "\n".join(lines)}
    return json.dumps({"grammars": [first, {**answer, "name": "answer"}]})


def _refusal(kind: GrammarKind, reason: str) -> InvalidRequestError:
    # llguidance's stack does not help a client.
    lines = re.split(r"\n<state>|\nbacktrace", reason)[0].strip()
    if _FAULT_OF_JSON.search(lines):
        kind, lines = "json_schema", _AROUND_FAULT.split(lines)[1]
    return InvalidRequestError(f"{kind}: {lines}", kind)


def structural_tag(
    text: str, prepared: Callable[[Mapping[str, Any]], dict[str, Any]], special: SpecialIds
) -> str:
    """Return the Lark grammar of a structural tag: free text with tags around JSON by schemas.

    A special token in a trigger, a beginning or an end is written by its id. Since it never occurs
    in free text, it begins a tag; a trigger of plain text is searched for in the text.

    Args:
        text: JSON with `structures` (`begin`, `schema`, `end`) and `triggers`.
        prepared: converts a schema to llguidance's form.
        special: text -> id of the special tokens.

    Raises:
        ValueError: `text` has another form.
    """
    value = json.loads(text)
    if not isinstance(value, dict) or not value.get("structures") or not value.get("triggers"):
        raise ValueError("must be an object with lists `structures` and `triggers`")
    lines = []
    for number, each in enumerate(value["structures"]):
        is_whole = isinstance(each, dict) and {"begin", "schema", "end"} <= each.keys()
        if not is_whole or not isinstance(each["schema"], dict):
            raise ValueError(f"structures[{number}]: must have begin, schema and end")
        begin, end = each["begin"], each["end"]
        trigger = next((one for one in value["triggers"] if one and begin.startswith(one)), None)
        if trigger is None:
            raise ValueError(f"structures[{number}]: {begin!r} begins with no trigger")
        body = f"%json {json.dumps(prepared(each['schema']))} {lark_literal(end, special)}"
        lines += _tag(f"tag_{number}", begin, len(trigger), body, special)
    tags = " | ".join(f"tag_{number}" for number in range(len(value["structures"])))
    head = ["%llguidance {}", f"start: ({tags})* TEXT", f"TEXT: /{_FREE_TEXT}/"]
    return "\n".join([*head, *lines])


def _tag(rule: str, begin: str, trigger_size: int, body: str, special: SpecialIds) -> list[str]:
    """Return the lines of a tag after free text. The trigger is cut before its first special token,
    which may extend beyond it."""
    plain, *rest = split_special(begin, special)
    if len(plain) >= trigger_size:
        trigger, rest = plain[:trigger_size], [plain[trigger_size:], *rest]
        return [
            f"{rule}_trigger[lazy]: TEXT {lark_literal(trigger, special)}",
            f"{rule}: {rule}_trigger {lark_literal(''.join(rest), special)} {body}",
        ]
    before = "TEXT"
    lines = []
    if plain:
        before = f"TEXT_{rule.upper()}"
        lines = [f"{before}: /{_FREE_TEXT}{_escaped(plain)}/"]
    return [*lines, f"{rule}: {before} {lark_literal(''.join(rest), special)} {body}"]


def _escaped(text: str) -> str:
    """Return a regular expression of `text`, between slashes."""
    return re.sub("[^A-Za-z0-9 ]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)
