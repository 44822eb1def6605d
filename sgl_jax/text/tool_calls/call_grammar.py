"""Calls whose names and arguments are valid: what an answer is held to that must call a tool.

The format is one of calls that are JSON objects with a name and arguments, between texts.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from sgl_jax.core.grammar import JSON_STYLE

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

# The name of each tool -> the JSON schema of its arguments.
Schemas = Mapping[str, Mapping[str, Any]]


class CallGrammar(NamedTuple):
    """How the calls of a format are written.

    begin, end: what stands around each call.
    between: what stands between two.
    arguments: the key of the arguments, after `name`.
    """

    begin: str
    end: str
    between: str
    arguments: str

    def calls(self, tools: Schemas, *, is_single: bool) -> str:
        """Nothing but calls of `tools`, one or several, in Lark's form."""
        names = [f"call_{number}" for number in range(len(tools))]
        call = f"({' | '.join(names)})"
        more = "" if is_single else f" ({_literal(self.between)} {call})*"
        lines = [f"start: {call}{more}"]
        for name, (tool, schema) in zip(names, tools.items(), strict=True):
            # Each schema is a root of its own, which references in it begin with.
            arguments = json.dumps({**(schema or _NO_ARGUMENTS), "x-guidance": JSON_STYLE})
            head, tail = map(_literal, self._around(tool))
            lines += [f"{name}: {head} {name}_arguments {tail}"]
            lines += [f"{name}_arguments: %json {arguments}"]
        return "\n".join(lines)

    def calls_amid_content(self, tools: Schemas) -> str:
        """Any text, in which what follows `begin` is a call of `tools`: a structural tag.

        Raises ValueError for a format whose calls begin with no mark.
        """
        mark = self.begin.strip()
        if not mark:
            raise ValueError("calls of this format begin with no mark")
        structures = []
        for tool, schema in tools.items():
            head, tail = self._around(tool)
            structures.append({"begin": head, "schema": schema or _NO_ARGUMENTS, "end": tail})
        return json.dumps({"structures": structures, "triggers": [mark]})

    def _around(self, tool: str) -> tuple[str, str]:
        """What stands before and after the arguments of a call of `tool`."""
        name = json.dumps(tool, ensure_ascii=False)
        head = f'{self.begin}{{"name": {name}, "{self.arguments}": '
        return head, "}" + self.end


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
