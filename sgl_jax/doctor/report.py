"""The report: sections of text and facts, without anything that identifies a user or a machine."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAX_ERROR_CHARS = 400


@dataclass
class Section:
    """The result of one check.

    Attributes:
        lines: what it found, as text.
        facts: the same for JSON.
        failures: one line for each defect, with the flag that avoids it if there is one.
        seconds: how long it took.
    """

    name: str
    lines: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_text(self) -> str:
        verdict = "FAILED" if self.failures else "ok"
        lines = [*self.lines, *(f"FAILED: {failure}" for failure in self.failures)]
        body = "\n".join(f"  {line}" for line in lines)
        return f"[{self.name}] {verdict}, {self.seconds:.1f} s\n{body}"


class Redaction:
    """Replaces private text, such as paths, in messages of errors and in variables."""

    def __init__(self, private: Mapping[str, str]) -> None:
        """Replace each text of `private` by a name, and any other absolute path by `<path>`."""
        self._private = {text: name for text, name in private.items() if text}

    def __call__(self, text: str) -> str:
        for private in sorted(self._private, key=len, reverse=True):
            text = text.replace(private, self._private[private])
        return re.sub(r"(?<![\w<>.])/(?:[\w.@+-]+/)+[\w.@+-]*", "<path>", text)

    def of_error(self, error: BaseException) -> str:
        """Return the kind of an error and the beginning of its message."""
        message = " ".join(str(error).split())[:_MAX_ERROR_CHARS]
        return self(f"{type(error).__name__}: {message}")


def private_texts(model_path: str) -> dict[str, str]:
    """Return texts that a report must not have, and what replaces them."""
    return {
        str(Path(model_path).absolute()): "<model>",
        model_path: "<model>",
        str(Path.home()): "<home>",
        str(Path.cwd()): "<folder>",
    }


def summary(sections: list[Section]) -> str:
    """Return the last line of a text report."""
    failed = [section.name for section in sections if section.failures]
    return f"Result: failed: {', '.join(failed)}" if failed else "Result: all checks passed"


def as_json(sections: list[Section]) -> str:
    """Return the report as a JSON object."""
    return json.dumps(
        {
            "passed": not any(section.failures for section in sections),
            "sections": {
                section.name: {
                    **section.facts,
                    "failures": section.failures,
                    "seconds": round(section.seconds, 3),
                }
                for section in sections
            },
        },
        indent=2,
    )
