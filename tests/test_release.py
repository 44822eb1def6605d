"""Files of a release agree with the package: version, changelog, linters, and the lock file."""

import re
import tomllib
from pathlib import Path

import sgl_jax

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
HEADINGS = {"Breaking changes", "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_package_and_the_changelog_have_the_version_of_the_project() -> None:
    assert sgl_jax.__version__ == PROJECT["version"]
    newest, *_ = re.findall(r"^## (\d\S*) - \d{4}-\d{2}-\d{2}$", CHANGELOG, re.MULTILINE)
    assert newest == PROJECT["version"]


def test_the_changelog_keeps_its_form() -> None:
    assert len(CHANGELOG.splitlines()) <= 150
    sections = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE)) <= HEADINGS
