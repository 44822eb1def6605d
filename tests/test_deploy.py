"""What `deploy/` holds fits the server: names of metrics and labels, flags, and the dashboard."""

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from scripts.make_dashboard import FILE, text
from sgl_jax.core.command_line import parse_server_args
from tests.metrics.test_engine_metrics import HYBRID, Scrapes
from tests.scheduler.driver import Driver, generate, make_sizes

DEPLOY = Path(__file__).parents[1] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
PROMETHEUS_LABELS = {"instance", "job", "le", "alertname"}


@pytest.fixture(scope="module")
def exported() -> tuple[dict[str, set[str]], str]:
    """The labels of each exported sample, and the exposition."""
    scrapes = Scrapes(Driver(make_sizes(num_pages=64, groups=HYBRID, states=(9, 1, 1))))
    scrapes.driver.submit(generate("one", [1] * 20, 4))
    scrapes.driver.run()
    labels: dict[str, set[str]] = defaultdict(set)
    for family in scrapes.families().values():
        for sample in family.samples:
            labels[sample.name] |= {*sample.labels}
    return labels, scrapes.requests.exposition().decode()


def expressions() -> list[str]:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    dashboard = yaml.safe_load(FILE.read_text())  # JSON is YAML
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    queries = [each["query"] for each in dashboard["templating"]["list"]]
    return [each["expr"] for each in [*rules, *targets]] + queries


def test_the_dashboard_is_as_its_script_writes_it() -> None:
    assert FILE.read_text() == text()


def test_every_metric_of_the_dashboard_and_the_alerts_is_exported(
    exported: tuple[dict[str, set[str]], str],
) -> None:
    names = {name for each in expressions() for name in re.findall(r"sglang:[a-z_0-9]+", each)}
    assert len(names) > 25
    assert names <= exported[0].keys()


def test_every_label_of_the_dashboard_and_the_alerts_is_exported(
    exported: tuple[dict[str, set[str]], str],
) -> None:
    num_checked = 0
    for expression in expressions():
        for name, matchers in re.findall(r"(sglang:[a-z_0-9]+)\{([^}]*)\}", expression):
            used = set(re.findall(r"([a-z_]+)(?:=~|!=|=)", matchers))
            assert used <= exported[0][name] | PROMETHEUS_LABELS, (name, used)
            num_checked += 1
        (name, *_) = [*re.findall(r"sglang:[a-z_0-9]+", expression), ""]
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert {*group.split(", ")} <= exported[0][name] | PROMETHEUS_LABELS, expression
    assert num_checked > 30


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_but_the_prefix(exported: tuple[dict[str, set[str]], str]) -> None:
    lint = subprocess.run(
        ["promtool", "check", "metrics"], input=exported[1], capture_output=True, text=True
    )
    lines = (lint.stdout + lint.stderr).splitlines()
    assert lines
    assert [line for line in lines if not line.endswith("should not contain ':'")] == []
    rules = subprocess.run(["promtool", "check", "rules", ALERTS], capture_output=True, text=True)
    assert rules.returncode == 0, rules.stdout + rules.stderr


def test_the_service_starts_the_server_with_its_own_flags() -> None:
    service = (DEPLOY / "systemd" / "sgl-jax.service").read_text()
    (command,) = re.findall(r"ExecStart=\S+ -m sgl_jax.launch_server (.*)", service)
    assert parse_server_args(command.split(), {}).model_path == "/srv/models/model"
