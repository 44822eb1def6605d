"""Detects the abilities of a chat template, and adapts conversations to it.

The result depends only on probe conversations, once per template, and never on a request's text.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import msgspec

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.text.call_arguments import (
    PROBE,
    PROBE_RESULT,
    ArgumentUse,
    Messages,
    Render,
    functions,
    probe_call,
)

Message = dict[str, Any]
System = Literal["anywhere", "first", "nowhere"]
Content = Literal["text", "parts", "both"]
Thinking = Literal["kept", "last turn", "dropped"]

_SYSTEMS = get_args(System)
_FORMS: dict[Content, frozenset[str]] = {
    "text": frozenset(["text"]),
    "parts": frozenset(["parts"]),
    "both": frozenset(["text", "parts"]),
}
_INSTRUCTING = ("system", "developer")
_UNKNOWN_ROLE = "probe_role"
_THOUGHT = "probe thought"


class TemplateAbilities(msgspec.Struct, frozen=True):
    """The abilities of a chat template. The defaults are assumed if it cannot be probed.

    Attributes:
        system: where it writes system messages.
        developer: it has a rule for this role, rather than copying the name of any role.
        successive_users: it writes two messages of the user in a row.
        tool: it writes results of tools.
        content: the form of contents that it writes: a string, a list of texts (`parts`), or both.
        arguments: the forms of arguments of calls that it writes.
        thinking: which reasoning of earlier answers it writes; `last turn`: only reasoning after
            the last message of the user.
    """

    system: System = "anywhere"
    developer: bool = False
    successive_users: bool = True
    tool: bool = True
    content: Content = "text"
    arguments: ArgumentUse = ArgumentUse()
    thinking: Thinking = "dropped"

    @classmethod
    def of(cls, render: Render, render_with_tools: Render) -> "TemplateAbilities":
        """Probe a template without tools and with a tool, and keep the stricter result, since some
        refuse more with tools. Both functions raise `InvalidRequestError` if the template refuses.
        """
        found = [each for each in map(cls._of, (render, render_with_tools)) if each is not None]
        if not found:
            return cls()
        own, other = found[0], found[-1]
        contents = _FORMS[own.content] & _FORMS[other.content] or _FORMS[own.content]
        return msgspec.structs.replace(
            own,
            system=max(own.system, other.system, key=_SYSTEMS.index),
            developer=own.developer and other.developer,
            successive_users=own.successive_users and other.successive_users,
            content=next(form for form, forms in _FORMS.items() if forms == contents),
        )

    @classmethod
    def _of(cls, render: Render) -> "TemplateAbilities | None":
        """Probe a template. Return None if it writes no message of a user."""
        content: Content = "text"
        if _written(render, ["user"]) is None:
            if not _joins_parts(render, ["user"]):
                return None
            content = "parts"
        formed = _formed(render, content)
        system, arguments = _probe_system(formed), ArgumentUse.of(formed)
        call = probe_call(PROBE if arguments.takes_objects else json.dumps(PROBE))
        roles = ["system", "user", "assistant", "user"][system == "nowhere" :]
        if content == "text" and _joins_parts(render, roles):
            content = "both"
        return cls(
            system=system,
            developer=_has_developer(formed, system),
            successive_users=_written(formed, ["user", "user"]) is not None,
            # If it refuses the call too, the template's reason is the better error.
            tool=_rendered(formed, call, [PROBE_RESULT]) is not None
            or _rendered(formed, call[:-1]) is None,
            content=content,
            arguments=arguments,
            thinking=_probe_thinking(formed, call),
        )

    def render(self, messages: Messages, render: Render) -> str:
        """Return the prompt of `messages`, adapted to the template (rules: docs/guide/apis.md).

        Contents are strings or lists of texts in OpenAI's form; arguments of calls are text. If the
        template refuses the conversation in spite of the probes, simpler forms are tried.

        Raises:
            InvalidRequestError: the template refuses all forms, or cannot write the results of
                tools.
        """
        if not self.tool and any(each["role"] == "tool" for each in messages):
            raise InvalidRequestError(
                "the model's chat template does not write results of tools; start the server with "
                "another --chat-template",
                "messages",
            )
        try:
            return self._render(messages, render)
        except InvalidRequestError:
            tried = [(self, messages)]
            for form in self._simpler_forms(messages):
                if form in tried:
                    continue
                tried.append(form)
                simpler, simplified = form
                with contextlib.suppress(InvalidRequestError):
                    return simpler._render(simplified, render)
            raise

    def _simpler_forms(self, messages: Messages) -> Iterator[tuple["TemplateAbilities", Messages]]:
        """Yield abilities and messages to try after a refusal of `messages`, closest first."""
        system: System = "first" if self.system == "anywhere" else self.system
        one_system = msgspec.structs.replace(self, system=system)
        joined = msgspec.structs.replace(one_system, successive_users=False)
        yield one_system, messages
        yield joined, messages
        in_results = _with_users_in_results(messages)
        if len(in_results) < len(messages):
            yield joined, in_results
        is_cut = [bool(each.get("tool_calls") and each["content"]) for each in messages]
        if any(is_cut):
            yield (
                joined,
                [
                    {**each, "reasoning_content": None} if cut else each
                    for each, cut in zip(messages, is_cut, strict=True)
                ],
            )

    def _render(self, messages: Messages, render: Render) -> str:
        arranged = [{**each, "role": self._role_of(each)} for each in messages]
        if self.system != "anywhere":
            arranged = self._with_one_system(arranged)
        if not self.successive_users:
            arranged = _with_joined_neighbours(arranged)
        formed = _formed(render, self.content)
        if any(functions(arranged)):
            return self.arguments.render(arranged, formed)
        return formed(arranged)

    def _role_of(self, message: Any) -> str:
        role: str = message["role"]
        return "system" if role == "developer" and not self.developer else role

    def _with_one_system(self, messages: list[Message]) -> list[Message]:
        system = [each for each in messages if each["role"] in _INSTRUCTING]
        if not system or (self.system == "first" and system == messages[:1]):
            return messages
        rest = [each for each in messages if each["role"] not in _INSTRUCTING]
        role = "user" if self.system == "nowhere" else system[0]["role"]
        return [{**system[0], "role": role, "content": _joined(system)}, *rest]


def _with_joined_neighbours(messages: list[Message]) -> list[Message]:
    """Join successive user messages and successive answers without calls, so roles alternate."""
    joined = list[Message]()
    for each in messages:
        last = joined[-1] if joined else {}
        is_answer = each["role"] == "assistant" and not (
            each.get("tool_calls") or last.get("tool_calls")
        )
        if last.get("role") == each["role"] and (each["role"] == "user" or is_answer):
            joined[-1] = {**last, "content": _joined([last, each])}
        else:
            joined.append(each)
    return joined


def _with_users_in_results(messages: Messages) -> list[Message]:
    """Return `messages` with a user's text after a tool's result moved into that result."""
    joined = list[Message]()
    for each in messages:
        if joined and joined[-1]["role"] == "tool" and each["role"] == "user":
            joined[-1] = {**joined[-1], "content": _joined([joined[-1], each])}
        else:
            joined.append({**each})
    return joined


def _joined(messages: Messages) -> Any:
    contents = [each["content"] for each in messages]
    if any(map(_has_image, contents)):
        return [part for content in contents for part in _parts_of(content)]
    return "\n\n".join(filter(None, map(_text_of, contents)))


def _has_image(content: Any) -> bool:
    return isinstance(content, list) and any(part["type"] == "image" for part in content)


def _parts_of(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def _text_of(content: Any) -> Any:
    """Return a content without a list, unless it has an image. None, from a message with calls,
    stays."""
    if not isinstance(content, list) or _has_image(content):
        return content
    return "\n".join(part["text"] for part in content)


def _formed(render: Render, form: Content) -> Render:
    """Return `render` preceded by a conversion of contents to this form."""

    def content_of(message: Any) -> Any:
        content = message["content"]
        if form == "parts":
            return content if content is None else _parts_of(content)
        # Templates that take parts elsewhere write a text next to calls unchanged, and have a
        # different form for a list of results.
        has_text = message["role"] == "tool" or message.get("tool_calls")
        is_kept = form == "both" and not has_text
        return content if is_kept else _text_of(content)

    return lambda messages: render([{**each, "content": content_of(each)} for each in messages])


def _rendered(render: Render, messages: Messages, texts: Sequence[str] = ()) -> str | None:
    """Return the prompt; None if the template refuses `messages` or omits any of `texts`."""
    try:
        prompt = render(messages)
    except InvalidRequestError:
        return None
    return prompt if all(text in prompt for text in texts) else None


def _written(render: Render, roles: Sequence[str]) -> str | None:
    """Return the prompt of messages of `roles`; None unless the template writes each of them."""
    messages = [{"role": role, "content": f"probe {number}"} for number, role in enumerate(roles)]
    return _rendered(render, messages, [each["content"] for each in messages])


def _anywhere(role: str) -> list[str]:
    """Return roles that do not alternate, with or without `role`."""
    return [role, "user", role, "assistant", "user", role, "user", role]


def _probe_system(render: Render) -> System:
    if _written(render, _anywhere("system")) is not None:
        return "anywhere"
    return "nowhere" if _written(render, ["system", "user"]) is None else "first"


def _has_developer(render: Render, system: System) -> bool:
    """Return whether a developer is written, and differently from an unknown role."""
    end = None if system == "anywhere" else 2  # only the first message has the role
    known, unknown = (
        _written(render, _anywhere(role)[:end]) for role in ("developer", _UNKNOWN_ROLE)
    )
    if known is None or unknown is None:
        return known is not None
    return unknown.lower().replace(_UNKNOWN_ROLE, "developer") != known.lower()


def _joins_parts(render: Render, roles: Sequence[str]) -> bool:
    """Return whether all texts of lists are written, and no list in Python's notation."""
    pairs = [(f"probe {number}a", f"probe {number}b") for number in range(len(roles))]
    messages = [
        {"role": role, "content": [{"type": "text", "text": text} for text in pair]}
        for role, pair in zip(roles, pairs, strict=True)
    ]
    prompt = _rendered(render, messages, [text for pair in pairs for text in pair]) or ""
    between = [prompt.partition(a)[2].partition(b)[0] for a, b in pairs]
    return bool(prompt) and not any("text" in each for each in between)


def _probe_thinking(render: Render, call: Messages) -> Thinking:
    """Probe with reasoning before the last question, and before a call after it."""
    question, said, result = call
    answer = {"role": "assistant", "content": "probe", "reasoning_content": _THOUGHT}
    if _rendered(render, [question, answer, question], [_THOUGHT]) is not None:
        return "kept"
    called = [question, {**said, "reasoning_content": _THOUGHT}, result]
    return "dropped" if _rendered(render, called, [_THOUGHT]) is None else "last turn"
