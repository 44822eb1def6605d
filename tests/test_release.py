"""Files of a release agree with the package: version, changelog, linters, and the lock file."""

import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import sgl_jax

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
LOCK = (ROOT / "requirements.lock").read_text()
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


def test_the_lock_file_has_a_version_in_each_range() -> None:
    locked = {
        canonicalize_name(name): Version(version)
        for name, version in re.findall(r"^([^#\s=]+)==(\S+)$", LOCK, re.MULTILINE)
    }
    extras = re.findall(r"--extra (\w+)", LOCK)
    assert {"test", "bench", "docs"} <= set(extras)
    for requirement in requirements(extras):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])


def requirements(extras: list[str]) -> Iterator[Requirement]:
    """Requirements of the package and of the extras, without the package's own extras."""
    groups = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][each] for each in extras)]
    for line in itertools.chain.from_iterable(groups):
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            yield from map(
                Requirement,
                (
                    line
                    for each in requirement.extras
                    for line in PROJECT["optional-dependencies"][each]
                ),
            )
        else:
            yield requirement


def test_the_lock_file_names_no_place_of_packages() -> None:
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.]+", line)] == []


def test_the_hooks_before_a_commit_are_the_linters_of_the_ci() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["entry"] for repo in config["repos"] for hook in repo["hooks"]}
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert hooks == {line for line in commands if re.match(r"ruff|mypy|lint-imports|vulture", line)}


def test_the_workflow_runs_the_command_that_must_pass() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    (step,) = (step for step in job["steps"] if "run" in step)
    assert (ROOT / step["run"]).is_file()
    assert (ROOT / step["env"]["PIP_CONSTRAINT"]).is_file()


@pytest.mark.parametrize("page", ["AGENTS.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_every_file_that_a_page_of_the_root_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    paths = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    if page == "AGENTS.md":
        paths += re.findall(r"`(?:python )?([\w.]+/[\w/.]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
