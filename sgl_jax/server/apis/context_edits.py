"""`context_management` of `/v1/messages`: clear old tool results and thinking before the prompt.

Edits are a function of the conversation, which the client sends in full each time, so nothing is
kept between requests.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sgl_jax.core.errors import ContextLengthError
from sgl_jax.server.chat_request import ChatMessage, ChatRequest, FunctionName
from sgl_jax.server.fields import Items
from sgl_jax.server.strict_model import StrictModel

_CLEARED = "[Old tool result cleared]"
_DEFAULT_TRIGGER_TOKENS = 100_000  # Anthropic's default, like the next
_DEFAULT_TOOL_USES = 3
_MAX_EDITS = 16
_Names = Annotated[Items[FunctionName], Field(max_length=1024)]
# Messages after an edit, and the number of cleared tool uses or turns.
_Edited = tuple[list[ChatMessage], int]


class InputTokens(StrictModel):
    type: Literal["input_tokens"]
    value: int = Field(ge=0)


class ToolUses(StrictModel):
    type: Literal["tool_uses"]
    value: int = Field(ge=0)


class ThinkingTurns(StrictModel):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1)


class AllTurns(StrictModel):
    type: Literal["all"]


_Amount = Annotated[InputTokens | ToolUses, Field(discriminator="type")]
_Turns = Annotated[ThinkingTurns | AllTurns, Field(discriminator="type")]


class ClearToolUses(StrictModel):
    """Replaces the oldest results of tools by a short text if the prompt is long."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: _Amount = Field(
        default=InputTokens(type="input_tokens", value=_DEFAULT_TRIGGER_TOKENS),
        description="applied above this; default: 100,000 tokens",
    )
    keep: ToolUses = Field(
        default=ToolUses(type="tool_uses", value=_DEFAULT_TOOL_USES),
        description="latest uses that stay; default: 3",
    )
    clear_at_least: InputTokens | None = Field(
        default=None, description="not applied if it clears fewer"
    )
    exclude_tools: _Names | None = Field(default=None, description="never cleared")
    clear_tool_inputs: bool | _Names | None = Field(
        default=None, description="true, or names of tools: clear the inputs of the calls, too"
    )

    counts: ClassVar[str] = "cleared_tool_uses"

    @property
    def min_cleared_tokens(self) -> int:
        return self.clear_at_least.value if self.clear_at_least else 0

    @property
    def trigger_tokens(self) -> int:
        """Return the number of prompt tokens above which the edit applies; -1: any prompt."""
        return self.trigger.value if isinstance(self.trigger, InputTokens) else -1

    def edit(self, messages: list[ChatMessage]) -> _Edited:
        """Return the messages with old results cleared, as if the prompt were long enough."""
        names = {call.id: call.function.name for each in messages for call in each.tool_calls or ()}
        results = [at for at, each in enumerate(messages) if each.role == "tool"]
        if isinstance(self.trigger, ToolUses) and len(results) <= self.trigger.value:
            return messages, 0
        excluded = set(self.exclude_tools or ())
        old = [
            at
            for at in results[: max(len(results) - self.keep.value, 0)]
            if names.get(messages[at].tool_call_id) not in excluded
        ]
        ids = {messages[at].tool_call_id for at in old}
        edited = [self._without_inputs(message, ids) for message in messages]
        for at in old:
            edited[at] = messages[at].model_copy(update={"content": _CLEARED})
        return edited, len(old)

    def _without_inputs(self, message: ChatMessage, ids: set[str | None]) -> ChatMessage:
        chosen = self.clear_tool_inputs
        if not (message.tool_calls and chosen):
            return message
        calls = []
        for call in message.tool_calls:
            if call.id in ids and (chosen is True or call.function.name in chosen):
                function = call.function.model_copy(update={"arguments": "{}"})
                call = call.model_copy(update={"function": function})
            calls.append(call)
        return message.model_copy(update={"tool_calls": calls})


class ClearThinking(StrictModel):
    """Drops the assistant's thinking in all turns except the latest. A turn ends with a message of
    the user other than a tool result."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | _Turns = Field(
        default=ThinkingTurns(type="thinking_turns", value=1),
        description="latest turns with thinking that keep it; default: 1",
    )

    counts: ClassVar[str] = "cleared_thinking_turns"
    min_cleared_tokens: ClassVar[int] = 0
    trigger_tokens: ClassVar[int] = -1

    def edit(self, messages: list[ChatMessage]) -> _Edited:
        if not isinstance(self.keep, ThinkingTurns):
            return messages, 0
        numbered = list(zip(_turns(messages), messages, strict=True))
        thinking = sorted({turn for turn, each in numbered if each.reasoning_content})
        cleared = set(thinking[: max(len(thinking) - self.keep.value, 0)])
        edited = [
            each.model_copy(update={"reasoning_content": None}) if turn in cleared else each
            for turn, each in numbered
        ]
        return edited, len(cleared)


def _turns(messages: list[ChatMessage]) -> Iterator[int]:
    turn, last_role = 0, ""
    for message in messages:
        # One message with results and a text is two messages here; both belong to the turn before.
        turn += message.role == "user" and last_role != "tool"
        last_role = message.role if message.role != "system" else last_role
        yield turn


class ContextManagement(StrictModel):
    """Edits of the conversation, applied in order."""

    edits: (
        Annotated[
            Items[Annotated[ClearToolUses | ClearThinking, Field(discriminator="type")]],
            Field(max_length=_MAX_EDITS),
        ]
        | None
    ) = None


async def edited(
    chat: ChatRequest,
    management: ContextManagement,
    count_tokens: Callable[[ChatRequest], Awaitable[int]],
    max_tokens: int,
) -> tuple[ChatRequest, list[dict[str, Any]]]:
    """Return the chat after the edits that apply, and a report of each of them.

    `count_tokens` is called only if an edit has something to clear. If it refuses a prompt as too
    long, the prompt counts as `max_tokens`, and the reported number of cleared tokens is a lower
    bound.
    """

    async def count(chat: ChatRequest) -> int:
        try:
            return await count_tokens(chat)
        except ContextLengthError:
            return max_tokens

    applied: list[dict[str, Any]] = []
    for edit in management.edits or ():
        messages, num_cleared = edit.edit(chat.messages)
        if not num_cleared:
            continue
        before = await count(chat)
        if before <= edit.trigger_tokens:
            continue
        changed = chat.model_copy(update={"messages": messages})
        cleared_tokens = max(before - await count(changed), 0)
        if cleared_tokens < edit.min_cleared_tokens:
            continue
        chat = changed
        counts = {edit.counts: num_cleared, "cleared_input_tokens": cleared_tokens}
        applied.append({"type": edit.type, **counts})
    return chat, applied
