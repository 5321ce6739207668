"""The chart, rendered by Helm's own code (its SDK as a library): for tests that read it, and for one that runs it."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy/helm/manylora"
RELEASE, NAMESPACE = "manylora", "llm"
ONE_MACHINE: Mapping[str, Any] = {
    "pools": {"default": {"model": {"name": "llama", "volume": {"hostPath": {"path": "/models/llama"}}}}}
}
MANY_MACHINES: Mapping[str, Any] = {
    "images": {"prefix": "registry.example/manylora"},
    "tls": {"issuer": {"name": "internal", "kind": "ClusterIssuer"}, "hosts": ["llm.example"]},
    "etcd": {
        "endpoints": ["etcd-0.etcd:2379", "etcd-1.etcd:2379"],
        "tlsSecret": "etcd-tls",
        "loginSecret": "etcd-login",
    },
    "adapterStore": {"bucket": "s3://adapters/live", "accessSecret": "adapters-access"},
    "secrets": {"peer": {"name": "peer"}, "operatorKey": {"name": "operator"}},
    "pools": {"default": {"model": {"name": "llama", "volume": {"persistentVolumeClaim": {"claimName": "llama"}}}}},
}


def laid_over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(copy.deepcopy(under))
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = laid_over(found[name], value) if both else copy.deepcopy(value)
    return found


def production(over: Mapping[str, Any] = MANY_MACHINES) -> dict[str, Any]:
    return laid_over(yaml.safe_load((CHART / "values-production.yaml").read_text()), over)


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Rendered, by file. Raises HelmRenderError, HelmChartInvalidError."""
    import helm_python

    rendered: dict[str, str] = helm_python.Chart.load(str(CHART)).render(
        dict(values), name=RELEASE, namespace=NAMESPACE
    )
    return {Path(path).name: text for path, text in rendered.items()}


@functools.cache
def _documents(values: str) -> Sequence[Mapping[str, Any]]:
    found = texts(json.loads(values))
    return [
        document
        for name, text in found.items()
        if name != "NOTES.txt"
        for document in yaml.safe_load_all(text)
        if document is not None
    ]


def documents(values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return _documents(json.dumps(values))


def named(values: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    (found,) = (d for d in documents(values) if (d["kind"], d["metadata"]["name"]) == (kind, name))
    return found


def workloads(values: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Pods' specifications by their component; of workers the default pool's."""
    found: dict[str, Mapping[str, Any]] = {}
    for document in documents(values):
        if document["kind"] in ("Deployment", "StatefulSet"):
            labels = document["spec"]["template"]["metadata"]["labels"]
            if labels.get("manylora/pool", "default") == "default":
                found[labels["app.kubernetes.io/component"]] = document["spec"]["template"]["spec"]
    return found


def container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    (only,) = pod["containers"]
    return dict(only)
