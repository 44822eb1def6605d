"""The manifests in `deploy/kubernetes` follow Kubernetes' schemas, and start engines that serve."""

import shutil
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sgl_jax.core.command_line import parse_server_args
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.multihost.group import DEFAULT_PORT, with_group
from sgl_jax.planner.topology import Topology
from sgl_jax.server.guards.keys import OPEN_PATHS, ApiKeys
from tests.support.custom_resources import CUSTOM, check
from tests.support.documented import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(
    path.parent.name
    for path in FOLDER.glob("*/kustomization.yaml")
    if yaml.safe_load(path.read_text())["kind"] != "Component"
)
VERSION = "1.33"
KEYS = "sgl-jax-keys"  # the Secret
GENERATIONS = {
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v6e-slice": "v6e",
    "tpu7x": "tpu7x",
}


def rendered(name: str) -> list[dict[str, Any]]:
    """The resources of a folder, as `kubectl kustomize` prints them: files, bases, JSON patches."""
    folder = FOLDER / name
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    resources: list[dict[str, Any]] = []
    for entry in kustomization["resources"]:
        path = (folder / entry).resolve()
        own = rendered(path.name) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
        resources += own
    apply_patches(kustomization, resources)
    for entry in kustomization.get("components", ()):
        path = (folder / entry).resolve()
        component = yaml.safe_load((path / "kustomization.yaml").read_text())
        for file in component["resources"]:
            resources += yaml.safe_load_all((path / file).read_text())
        apply_patches(component, resources)
    return resources


def apply_patches(kustomization: dict[str, Any], resources: list[dict[str, Any]]) -> None:
    for patch in kustomization.get("patches", ()):
        target = find(resources, patch["target"]["kind"], patch["target"]["name"])
        for change in yaml.safe_load(patch["patch"]):
            *parents, last = change["path"].strip("/").split("/")
            holder: Any = target
            for key in parents:
                holder = holder[int(key) if isinstance(holder, list) else key]
            index = int(last) if isinstance(holder, list) else last
            is_new = isinstance(holder, dict) and index not in holder
            assert change["op"] == ("add" if is_new else "replace")
            holder[index] = change["value"]


def find(resources: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The only resource of this kind and name."""
    (found,) = (
        each for each in resources if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def engine_pod(resources: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """The template of the engine's pods, and their number."""
    for each in resources:
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "sgl-jax":
            return each["spec"]["template"], 1
        if each["kind"] == "LeaderWorkerSet":
            template = each["spec"]["leaderWorkerTemplate"]
            return template["workerTemplate"], template["size"]
    raise AssertionError("no engine")


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_resource_follows_its_schema(name: str) -> None:
    for resource in rendered(name):
        if resource["kind"] not in CUSTOM:
            kubernetes_validate.validate(resource, VERSION, strict=True)
            continue
        check(resource)
        if resource["kind"] == "LeaderWorkerSet":
            template = resource["spec"]["leaderWorkerTemplate"]
            assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
            pods = {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": "workers"},
                "template": template["workerTemplate"],
            }
            kubernetes_validate.validate(pods, VERSION, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("name", OVERLAYS)
def test_kustomize_renders_the_same(name: str) -> None:
    command = ["kubectl", "kustomize", str(FOLDER / name)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def by_name(resources: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
        return {(each["kind"], each["metadata"]["name"]): each for each in resources}

    assert by_name(list(yaml.safe_load_all(shown))) == by_name(rendered(name))


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_engine_has_the_chips_and_hosts_of_its_slice(name: str) -> None:
    template, num_hosts = engine_pod(rendered(name))
    spec = template["spec"]
    (container,) = spec["containers"]
    args = args_of(container, num_hosts)
    selector = spec["nodeSelector"]
    generation = GENERATIONS[selector["cloud.google.com/gke-tpu-accelerator"]]
    topology = Topology.parse(f"{generation}:{selector['cloud.google.com/gke-tpu-topology']}")
    topology.check_mesh(args.dp_size, args.tp_size)
    assert topology.num_hosts == num_hosts
    chips = int(container["resources"]["limits"]["google.com/tpu"])
    assert chips * num_hosts == topology.num_chips
    assert args.num_devices == topology.num_devices
    assert spec["terminationGracePeriodSeconds"] > args.drain_timeout
    assert spec["securityContext"]["runAsNonRoot"]


def args_of(container: dict[str, Any], num_hosts: int) -> ServerArgs:
    """The settings with which the last pod starts; ports as the manifest opens them."""
    assert container["command"] == ["python", "-m", "sgl_jax.launch_server"]
    environment = {"SGL_JAX_HOST_KEY": "k" * 16} if num_hosts > 1 else {}
    names = {each["name"] for each in container["env"]}
    assert environment.keys() <= names
    args = parse_server_args(container["args"], environment)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports["http"] == args.port
    if num_hosts > 1:
        platform = {
            "LWS_GROUP_SIZE": str(num_hosts),
            "LWS_WORKER_INDEX": str(num_hosts - 1),
            "LWS_LEADER_ADDRESS": "sgl-jax-hosts-0.sgl-jax-hosts",
        }
        args = with_group(args, platform, lambda name: None)
        assert args.nnodes == num_hosts
        assert (ports["hosts"], ports["jax"]) == (DEFAULT_PORT, DEFAULT_PORT + 1)
    return args


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_engine_needs_a_key_and_is_for_its_namespace(name: str) -> None:
    resources = rendered(name)
    template, _ = engine_pod(resources)
    (container,) = template["spec"]["containers"]
    secrets = {
        each["name"]: each["valueFrom"]["secretKeyRef"]["key"]
        for each in container["env"]
        if each.get("valueFrom", {}).get("secretKeyRef", {}).get("name") == KEYS
    }
    assert secrets == {"SGL_JAX_API_KEY": "api-key", "SGL_JAX_ADMIN_API_KEY": "admin-api-key"}
    args = parse_server_args(container["args"], {each: each.lower() for each in secrets})
    assert not ApiKeys.from_args(args).is_open
    assert args.open_metrics
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[kind]["httpGet"]["path"] in OPEN_PATHS
    labels = template["metadata"]["labels"]
    policies = [
        each["spec"]
        for each in resources
        if each["kind"] == "NetworkPolicy" and each["spec"]["podSelector"]["matchLabels"] == labels
    ]
    assert policies
    sources = [rule["from"] for policy in policies for rule in policy["ingress"]]
    assert {"podSelector": {}} in [each for source in sources for each in source]
    for source in sources:
        assert all({"podSelector", "ipBlock"} & each.keys() for each in source)
        assert {"ipBlock": {"cidr": "0.0.0.0/0"}} not in source


def test_the_image_has_the_user_of_the_manifests() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for name in OVERLAYS:
        template, _ = engine_pod(rendered(name))
        user = template["spec"]["securityContext"]["runAsUser"]
        assert f"USER {user}\n" in dockerfile
    assert dockerfile.count("FROM python:3.12.") == 2  # a pinned version in both stages
