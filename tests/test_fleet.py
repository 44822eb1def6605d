"""The fleets of `deploy/kubernetes`: each part finds the next, and its flags and metrics exist."""

import re
from typing import Any

import pytest
import yaml

from tests.metrics.test_engine_metrics import Scrapes
from tests.scheduler.driver import Driver, make_sizes
from tests.support.documented import ROOT
from tests.test_kubernetes import FOLDER, args_of, engine_pod, find, rendered

ROUTER = rendered("fleet-router")
GATEWAY = rendered("fleet-gateway")
# Of llm-d's endpoint picker v0.10.0 (llm-d/llm-d-router): flags from pkg/epp/server/options.go,
# plugins from cmd/epp/runner/runner.go, and the fields of its metrics' extractor.
PICKER_FLAGS = {
    *("pool-name", "config-file", "zap-encoder", "tracing", "metrics-endpoint-auth"),
    *("enable-pprof", "drain-timeout"),
}
PICKER_PLUGINS = {
    *("core-metrics-extractor", "queue-scorer", "running-requests-size-scorer"),
    *("kv-cache-utilization-scorer", "prefix-cache-scorer"),
    *("openai-parser", "anthropic-parser", "passthrough-parser"),
}
METRIC_FIELDS = {
    *("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"),
    *("cacheBlockSizeSpec", "cacheNumBlocksSpec"),
}


def pod_of(resources: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The pod specification of a Deployment."""
    spec: dict[str, Any] = find(resources, "Deployment", name)["spec"]["template"]["spec"]
    return spec


def ports_of(container: dict[str, Any]) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container["ports"]}


def picker_config() -> dict[str, Any]:
    data = find(GATEWAY, "ConfigMap", "sgl-jax-picker")["data"]
    config: dict[str, Any] = yaml.safe_load(data["picker.yaml"])
    return config


@pytest.mark.parametrize("resources", [ROUTER, GATEWAY], ids=["router", "gateway"])
def test_a_fleet_runs_the_engine_of_single(resources: list[dict[str, Any]]) -> None:
    assert engine_pod(resources) == engine_pod(rendered("single"))
    engine = find(resources, "Deployment", "sgl-jax")["spec"]
    update = engine["strategy"]["rollingUpdate"]
    assert engine["replicas"] > update["maxUnavailable"] > update["maxSurge"] == 0


@pytest.mark.parametrize(
    ("resources", "name"),
    [(ROUTER, "sgl-jax-router"), (GATEWAY, "sgl-jax-picker")],
    ids=["router", "picker"],
)
def test_a_fleets_own_pod_is_served_and_has_its_rights(
    resources: list[dict[str, Any]], name: str
) -> None:
    pod = pod_of(resources, name)
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    assert {"readinessProbe", "livenessProbe"} <= container.keys()
    labels = find(resources, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
    service = find(resources, "Service", name)["spec"]
    assert service["selector"].items() <= labels.items()
    named = ports_of(container)
    assert {each.get("targetPort", each["port"]) for each in service["ports"]} <= {
        *named,
        *named.values(),
    }
    find(resources, "ServiceAccount", pod["serviceAccountName"])
    binding = find(resources, "RoleBinding", name)
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": pod["serviceAccountName"]}]
    rules = find(resources, "Role", binding["roleRef"]["name"])["rules"]
    assert {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]} in rules
    assert all(rule["verbs"] == ["get", "list", "watch"] for rule in rules)


def test_the_router_takes_its_flags_and_finds_the_engines() -> None:
    pytest.importorskip("sglang_router")
    from sglang_router.launch_router import parse_router_args

    pod = pod_of(ROUTER, "sgl-jax-router")
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "sglang_router.launch_router"]
    args = parse_router_args(container["args"])
    ports = ports_of(container)
    assert (args.port, args.prometheus_port) == (ports["http"], ports["metrics"])
    assert args.policy == "cache_aware"
    template, _ = engine_pod(ROUTER)
    (engine,) = template["spec"]["containers"]
    assert args.service_discovery
    assert args.selector == template["metadata"]["labels"]
    assert args.service_discovery_port == ports_of(engine)["http"]
    assert args.service_discovery_namespace == f"$({container['env'][0]['name']})"
    assert pod["terminationGracePeriodSeconds"] > args.shutdown_grace_period_secs
    assert args.api_key == f"$({container['env'][1]['name']})"
    assert container["env"][1] in engine["env"]


def test_a_request_through_the_gateway_reaches_the_engines() -> None:
    route = find(GATEWAY, "HTTPRoute", "sgl-jax")["spec"]
    find(GATEWAY, "Gateway", route["parentRefs"][0]["name"])
    (rule,) = route["rules"]
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1"]
    (backend,) = rule["backendRefs"]
    pool = find(GATEWAY, backend["kind"], backend["name"])["spec"]
    template, _ = engine_pod(GATEWAY)
    (engine,) = template["spec"]["containers"]
    assert pool["selector"]["matchLabels"] == template["metadata"]["labels"]
    (port,) = pool["targetPorts"]
    assert port["number"] == ports_of(engine)["http"]
    picker = pool["endpointPickerRef"]
    service = find(GATEWAY, "Service", picker["name"])["spec"]
    assert picker["port"]["number"] in [each["port"] for each in service["ports"]]
    health = find(GATEWAY, "HealthCheckPolicy", "sgl-jax")["spec"]
    probe = health["default"]["config"]["httpHealthCheck"]
    assert (probe["requestPath"], probe["port"]) == ("/health", port["number"])
    for kind in ("HealthCheckPolicy", "GCPBackendPolicy"):
        target = find(GATEWAY, kind, "sgl-jax")["spec"]["targetRef"]
        assert target == backend


def test_the_picker_has_its_flags_and_drains_as_long_as_an_engine() -> None:
    pod = pod_of(GATEWAY, "sgl-jax-picker")
    (container,) = pod["containers"]
    assert container["image"].endswith(":v0.10.0")
    flags = dict(arg.removeprefix("--").split("=") for arg in container["args"])
    assert flags.keys() <= PICKER_FLAGS
    find(GATEWAY, "InferencePool", flags["pool-name"])
    (volume,) = pod["volumes"]
    (mount,) = container["volumeMounts"]
    assert volume["name"] == mount["name"]
    files = find(GATEWAY, "ConfigMap", volume["configMap"]["name"])["data"]
    assert flags["config-file"] in [f"{mount['mountPath']}/{file}" for file in files]
    drain = int(flags["drain-timeout"].removesuffix("s"))
    template, _ = engine_pod(GATEWAY)
    assert template["spec"]["terminationGracePeriodSeconds"] <= drain
    assert drain < pod["terminationGracePeriodSeconds"]
    liveness = container["livenessProbe"]
    assert (
        liveness["periodSeconds"] * liveness["failureThreshold"] > drain
    )  # not live while it drains


def test_the_picker_has_every_plugin_that_it_uses() -> None:
    config = picker_config()
    assert (config["apiVersion"], config["kind"]) == ("llm-d.ai/v1alpha1", "EndpointPickerConfig")
    plugins = {plugin["type"] for plugin in config["plugins"]}
    assert plugins <= PICKER_PLUGINS
    (profile,) = config["schedulingProfiles"]
    used = [*profile["plugins"], *config["requestHandler"]["parsers"]]
    assert {each["pluginRef"] for each in used} | {"core-metrics-extractor"} == plugins


def test_the_picker_reads_gauges_that_an_engine_exports() -> None:
    (extractor,) = (
        plugin["parameters"]
        for plugin in picker_config()["plugins"]
        if plugin["type"] == "core-metrics-extractor"
    )
    (engine,) = extractor["engineConfigs"]
    assert extractor["defaultEngine"] == engine["name"]
    specs = {field: name for field, name in engine.items() if field != "name"}
    assert specs.keys() == METRIC_FIELDS
    families = Scrapes(Driver(make_sizes())).families()
    for name in specs.values():
        family = families[name.removeprefix("sglang:")]
        assert family.type == "gauge", name
        assert len(family.samples) == 1, name  # the picker reads the first series alone
    template, num_hosts = engine_pod(GATEWAY)
    assert args_of(template["spec"]["containers"][0], num_hosts).dp_size == 1


def test_every_claim_of_an_engine_is_a_bucket() -> None:
    resources = rendered("single-bucket")
    template, _ = engine_pod(resources)
    assert template["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    handles = set()
    for volume in template["spec"]["volumes"]:
        claim = find(
            resources, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
        )
        bucket = find(resources, "PersistentVolume", claim["spec"]["volumeName"])["spec"]
        assert claim["spec"]["accessModes"] == bucket["accessModes"]
        assert claim["spec"]["storageClassName"] == bucket["storageClassName"] == ""
        user = template["spec"]["securityContext"]["runAsUser"]
        assert f"uid={user}" in bucket["mountOptions"]
        handles.add(bucket["csi"]["volumeHandle"])
    assert len(handles) == 2  # one bucket of two volumes would be mounted once
    assert (FOLDER / "bucket" / "volumes.yaml").read_text().count("my-project-") == 2


def test_every_manifest_that_the_guide_names_exists() -> None:
    guide = (ROOT / "docs" / "guide" / "kubernetes.md").read_text()
    named = set(re.findall(r"deploy/kubernetes/[\w./-]*\w", guide))
    assert {
        f"deploy/kubernetes/{name}" for name in ("single-bucket", "fleet-router-bucket")
    } <= named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    for path in (
        "single/engine.yaml",
        "fleet-router/router.yaml",
    ):  # the guide's sed finds the image
        assert (FOLDER / path).read_text().count("image: sgl-jax:latest") == 1
