"""The dialogues that the demonstration model is trained on: turns of all kinds, mixed.

``tasks`` defines the kinds of turns and the items that belong to training.
"""

import random
from collections.abc import Mapping

from benchmarks.demo_model.tasks import (
    ATTRIBUTES,
    DEFAULT_MIX,
    DialogueWriter,
    Message,
    Split,
    Turn,
    estimate_tokens,
    messages_of,
)

# With the tool offered; only the weather needs it.
TOOL_MIX: Mapping[str, float] = {
    **{kind: 0.3 * weight for kind, weight in DEFAULT_MIX.items()},
    "weather": 2.0,
}
# Many people with the same attribute: only the name selects the value.
DRILL_MIX: Mapping[str, float] = {
    "tell": 1.0,
    "recall": 2.0,
    "unknown": 1.5,
    "filler": 0.2,
    "weather_untold": 0.1,
}


def write_dialogue(
    rng: random.Random,
    split: Split,
    max_tokens: int,
    mix: Mapping[str, float] = DEFAULT_MIX,
    max_facts: int = 12,
    attributes: tuple[str, ...] = ATTRIBUTES,
) -> list[Message]:
    """Write mixed turns until they have about ``max_tokens`` tokens."""
    writer = DialogueWriter(rng, split, attributes)
    kinds, weights = list(mix), list(mix.values())
    turns: list[Turn] = []
    num_tokens = 0
    while num_tokens < max_tokens:
        kind = rng.choices(kinds, weights)[0]
        if kind == "tell" and len(writer.facts) >= max_facts:
            kind = "filler"
        turn = writer.write(kind)
        turns.append(turn)
        num_tokens += estimate_tokens(turn.user) + estimate_tokens(turn.assistant)
    return messages_of(rng, turns)
