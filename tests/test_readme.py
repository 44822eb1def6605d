"""The README is true: its flags table lists exactly the flags there are."""

import dataclasses
import re
from pathlib import Path

from sgl_jax.core.server_args import ServerArgs

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_flags_table_lists_every_flag_with_its_meaning() -> None:
    rows = dict(re.findall(r"^\| `--([a-z0-9-]+)` \| [^|]+ \| ([^|]+) \|$", README, re.MULTILINE))
    wanted = {
        setting.name.replace("_", "-"): setting.metadata["help"]
        for setting in dataclasses.fields(ServerArgs)
    }
    assert sorted(rows) == sorted(wanted)
    for name, meaning in wanted.items():
        assert rows[name].startswith(meaning), name


def test_the_flags_table_states_every_default() -> None:
    rows = dict(re.findall(r"^\| `--([a-z0-9-]+)` \| ([^|]+) \| [^|]+ \|$", README, re.MULTILINE))
    for setting in dataclasses.fields(ServerArgs):
        default = setting.default
        if default == "":
            wanted = "required"
        elif default is None or default == ():
            wanted = "-"
        elif default is False:
            wanted = "off"
        else:
            wanted = f"`{default}`"
        assert rows[setting.name.replace("_", "-")] == wanted, setting.name


def test_every_file_it_links_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parents[1] / target).exists(), target
