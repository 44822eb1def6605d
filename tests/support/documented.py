"""The pages with commands and programs for users, and their fenced blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "contributing.md", *sorted((ROOT / "docs" / "guide").glob("*.md")))


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def command_lines(page: Path) -> list[str]:
    """The lines of its shell blocks, those that a backslash or a quote continues joined."""
    script = "\n".join(text for kind, text in blocks(page) if kind == "bash")
    lines, open_line = [], ""
    for line in script.replace("\\\n", " ").splitlines():
        open_line = f"{open_line}\n{line}" if open_line else line
        if open_line.count("'") % 2 == 0:
            lines.append(open_line)
            open_line = ""
    return lines
