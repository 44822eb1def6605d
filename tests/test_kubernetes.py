"""The manifests in `deploy/kubernetes` follow Kubernetes' schemas, and start engines that serve."""

from typing import Any

import kubernetes_validate
import pytest
import yaml

from sgl_jax.core.command_line import parse_server_args
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.hosts.group import DEFAULT_PORT, with_group
from sgl_jax.planner.topology import Topology
from tests.documented import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("*/kustomization.yaml"))
VERSION = "1.33"
GENERATIONS = {
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v6e-slice": "v6e",
    "tpu7x": "tpu7x",
}
# Fields of LeaderWorkerSet v1, which Kubernetes' own schemas lack
# (github.com/kubernetes-sigs/lws, docs/reference/leaderworkerset.v1.md).
LWS_SPEC = {
    *("replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy"),
    "networkConfig",
}
LWS_TEMPLATE = {
    *("leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy"),
    "volumeClaimTemplates",
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
    for patch in kustomization.get("patches", ()):
        (target,) = (
            each
            for each in resources
            if (each["kind"], each["metadata"]["name"])
            == (patch["target"]["kind"], patch["target"]["name"])
        )
        for change in yaml.safe_load(patch["patch"]):
            assert change["op"] == "replace"
            *parents, last = change["path"].strip("/").split("/")
            holder: Any = target
            for key in parents:
                holder = holder[int(key) if isinstance(holder, list) else key]
            index = int(last) if isinstance(holder, list) else last
            assert holder[index] is not None
            holder[index] = change["value"]
    return resources


def engine_pod(resources: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """The template of the engine's pods, and their number."""
    for each in resources:
        if each["kind"] == "Deployment":
            return each["spec"]["template"], 1
        if each["kind"] == "LeaderWorkerSet":
            template = each["spec"]["leaderWorkerTemplate"]
            return template["workerTemplate"], template["size"]
    raise AssertionError("no engine")


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_resource_follows_its_schema(name: str) -> None:
    for resource in rendered(name):
        if resource["kind"] != "LeaderWorkerSet":
            kubernetes_validate.validate(resource, VERSION, strict=True)
            continue
        assert resource["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        assert resource["spec"].keys() <= LWS_SPEC
        template = resource["spec"]["leaderWorkerTemplate"]
        assert template.keys() <= LWS_TEMPLATE
        assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
        pods = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "workers"},
            "template": template["workerTemplate"],
        }
        kubernetes_validate.validate(pods, VERSION, strict=True)


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


def test_the_image_has_the_user_of_the_manifests() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for name in OVERLAYS:
        template, _ = engine_pod(rendered(name))
        user = template["spec"]["securityContext"]["runAsUser"]
        assert f"USER {user}\n" in dockerfile
    assert dockerfile.count("FROM python:3.12.") == 2  # a pinned version in both stages
