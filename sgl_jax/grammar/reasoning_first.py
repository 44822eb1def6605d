"""Answers that are held to a grammar only after their reasoning."""

import json
from typing import Any

_NOTHING = '""'


def after_reasoning(grammar: str, opening: str, closing: str) -> str:
    """`grammar`, as llguidance takes it, after free text up to `closing`, and spaces.

    The text is there if it begins with `opening`; if that is the empty text, it is. Both are
    literals of Lark's form.
    """
    answer: dict[str, Any] = {"lark_grammar": grammar}
    if grammar.lstrip().startswith("{"):
        (answer,) = json.loads(grammar)["grammars"]
    if closing.startswith("<["):  # a token, which is no text
        thought = f"thought: /(?s:.*)/ {closing}"
    else:
        thought = f"thought[suffix={closing}]: /(?s:.*)/"
    reasoning = "thought SPACES" if opening == _NOTHING else f"({opening} thought SPACES)?"
    lines = [f"start: {reasoning} @answer", thought, r"SPACES: /[ \n]{0,4}/"]
    first = {"lark_grammar": "\n".join(lines)}
    return json.dumps({"grammars": [first, {**answer, "name": "answer"}]})
