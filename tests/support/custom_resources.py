"""Fields of the custom resources in `deploy/kubernetes`, which Kubernetes' own schemas lack.

A field with `!` is required. A tuple lists the allowed values, a list holds items of one form, and
`object` stands for any value. Sources: the definitions of LeaderWorkerSet v1
(kubernetes-sigs/lws), Gateway API v1 (kubernetes-sigs/gateway-api v1.6.1, standard channel) and
InferencePool v1 (kubernetes-sigs/gateway-api-inference-extension v1.6.0), and for GKE's policies
the fields that its own documentation and llm-d's chart use.
"""

from typing import Any

_REFERENCE = {"group": str, "kind": str, "name!": str, "namespace": str}
_TARGET = {"group!": str, "kind!": str, "name!": str}
_LEADER_WORKER_SET = {
    "replicas": int,
    "leaderWorkerTemplate!": {
        "leaderTemplate": object,
        "workerTemplate!": object,
        "size": int,
        "restartPolicy": ("RecreateGroupOnPodRestart", "None", "Default"),
        "subGroupPolicy": object,
        "volumeClaimTemplates": object,
    },
    "rolloutStrategy": object,
    "startupPolicy": str,
    "networkConfig": object,
}
_GATEWAY = {
    "gatewayClassName!": str,
    "listeners!": [
        {
            "name!": str,
            "hostname": str,
            "port!": int,
            "protocol!": ("HTTP", "HTTPS", "TLS", "TCP", "UDP"),
            "tls": object,
            "allowedRoutes": object,
        }
    ],
    "addresses": object,
    "infrastructure": object,
}
_HTTP_ROUTE = {
    "parentRefs": [_REFERENCE | {"port": int, "sectionName": str}],
    "hostnames": [str],
    "rules": [
        {
            "name": str,
            "matches": [
                {
                    "path": {
                        "type": ("Exact", "PathPrefix", "RegularExpression"),
                        "value": str,
                    },
                    "headers": object,
                    "queryParams": object,
                    "method": str,
                }
            ],
            "filters": object,
            "backendRefs": [_REFERENCE | {"port": int, "weight": int, "filters": object}],
            "timeouts": {"request": str, "backendRequest": str},
        }
    ],
}
_INFERENCE_POOL = {
    "selector!": {"matchLabels!": object},
    "targetPorts!": [{"number!": int}],
    "appProtocol": ("http", "kubernetes.io/h2c"),
    "endpointPickerRef": {
        "group": str,
        "kind": str,
        "name!": str,
        "port": {"number!": int},
        "failureMode": ("FailOpen", "FailClose"),
    },
}
_HEALTH_CHECK_POLICY = {
    "targetRef!": _TARGET,
    "default!": {
        "checkIntervalSec": int,
        "timeoutSec": int,
        "healthyThreshold": int,
        "unhealthyThreshold": int,
        "logConfig": {"enabled": bool},
        "config": {
            "type": ("HTTP", "HTTPS", "HTTP2", "GRPC", "TCP"),
            "httpHealthCheck": {"port": int, "portSpecification": str, "requestPath": str},
        },
    },
}
_BACKEND_POLICY = {
    "targetRef!": _TARGET,
    "default!": {"timeoutSec": int, "logging": {"enabled": bool, "sampleRate": int}},
}
CUSTOM: dict[str, tuple[str, Any]] = {
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io/v1", _LEADER_WORKER_SET),
    "Gateway": ("gateway.networking.k8s.io/v1", _GATEWAY),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", _HTTP_ROUTE),
    "InferencePool": ("inference.networking.k8s.io/v1", _INFERENCE_POOL),
    "HealthCheckPolicy": ("networking.gke.io/v1", _HEALTH_CHECK_POLICY),
    "GCPBackendPolicy": ("networking.gke.io/v1", _BACKEND_POLICY),
}


def check(resource: dict[str, Any]) -> None:
    """Compare a custom resource with the fields of its kind."""
    version, fields = CUSTOM[resource["kind"]]
    assert resource["apiVersion"] == version
    assert resource.keys() == {"apiVersion", "kind", "metadata", "spec"}
    check_value(resource["spec"], fields, resource["kind"])


def check_value(value: Any, form: Any, place: str) -> None:
    if isinstance(form, dict):
        required = {name.removesuffix("!") for name in form if name.endswith("!")}
        forms = {name.removesuffix("!"): each for name, each in form.items()}
        assert required <= value.keys() <= forms.keys(), place
        for name, each in value.items():
            check_value(each, forms[name], f"{place}.{name}")
    elif isinstance(form, list):
        assert isinstance(value, list), place
        for item in value:
            check_value(item, form[0], place)
    elif isinstance(form, tuple):
        assert value in form, place
    else:
        assert isinstance(value, form), place
