"""What `deploy/` holds fits the server: names of metrics and labels, flags, and the dashboard."""

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from scripts.make_dashboard import FILE, text
from scripts.run_stack import command_of, services
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


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    command = ["hadolint", DEPLOY / "Dockerfile"]
    lint = subprocess.run(command, capture_output=True, text=True)  # type: ignore[arg-type]
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_the_service_starts_the_server_with_its_own_flags() -> None:
    service = (DEPLOY / "systemd" / "sgl-jax.service").read_text()
    (command,) = re.findall(r"ExecStart=\S+ -m sgl_jax.launch_server (.*)", service)
    assert parse_server_args(command.split(), {}).model_path == "/srv/models/model"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_configuration() -> None:
    config = DEPLOY / "prometheus" / "prometheus.yaml"
    check = subprocess.run(["promtool", "check", "config", config], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr


def test_the_engines_of_the_stack_are_routed_scraped_and_checked() -> None:
    stack = services({})
    engines = {name: service for name, service in stack.items() if name.startswith("engine")}
    addresses = []
    for service in engines.values():
        command = command_of(service)
        assert command[1:3] == ["-m", "sgl_jax.launch_server"]
        args = parse_server_args(command[3:], {})
        assert args.model_path == "models/demo"
        addresses.append(f"{args.host}:{args.port}")
        assert f"'http://{addresses[-1]}/health'" in service["healthcheck"]["test"][-1]
    scrapes = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    assert scrapes["scrape_configs"][0]["static_configs"][0]["targets"] == addresses
    router = stack["router"]
    assert [word for word in command_of(router) if word.startswith("http")] == [
        f"http://{address}" for address in addresses
    ]
    assert router["depends_on"].keys() == engines.keys()


def test_files_that_the_stack_mounts_are_there() -> None:
    folder = "/srv/sgl_jax/"
    stack = services({})
    for service in stack.values():
        if "build" in service:
            dockerfile = DEPLOY.parent / service["build"]["dockerfile"]
            assert f"WORKDIR {service['working_dir']}\n" in dockerfile.read_text()
    (config,) = re.findall(r"--config.file=(\S+)", " ".join(command_of(stack["prometheus"])))
    provisioning = stack["grafana"]["environment"]["GF_PATHS_PROVISIONING"]
    providers = DEPLOY / "grafana" / "provisioning" / "dashboards" / "sgl_jax.yaml"
    dashboard = yaml.safe_load(providers.read_text())["providers"][0]["options"]["path"]
    for path in (config, provisioning.removeprefix(folder), dashboard.removeprefix(folder)):
        assert (DEPLOY.parent / path).exists(), path


def test_the_variables_of_the_stack_are_documented_and_used() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    readme = (DEPLOY / "README.md").read_text()
    used = set(re.findall(r"\$\{(\w+):-", text)) - {"PROMETHEUS_DATA"}  # of run_stack.py
    assert used == set(re.findall(r"^\| `([A-Z]+)` \|", readme, re.MULTILINE))
    engine = services({"MODEL": "other", "POLICY": ""})["engine-0"]
    assert "models/other" in command_of(engine)
