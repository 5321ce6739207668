"""The Helm chart: rendered by Helm's own code, held against Kubernetes' schemas and against what the services know.

No API server runs here: what only one would refuse (admission, custom resources' own schemas) is not seen.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from manylora_shared.telemetry.registry import LABELS, Metrics

from deploy import boards
from tests.helm_chart import (
    CHART,
    NAMESPACE,
    ONE_MACHINE,
    container,
    documents,
    laid_over,
    named,
    production,
    texts,
    workloads,
)

helm = pytest.importorskip("helm_python", reason="Helm's SDK has wheels for Linux on x86-64 alone")

SERVICES = ("router", "scheduler", "worker")
PLAIN = laid_over(ONE_MACHINE, {"tls": {"source": "none"}})
SECRET = laid_over(ONE_MACHINE, {"tls": {"source": "secret", "secretName": "own"}})
HPA = laid_over(production(), {"poolDefaults": {"autoscaling": {"kind": "hpa"}}})
MIG = laid_over(production(), {"poolDefaults": {"accelerator": {"resource": "nvidia.com/mig-3g.40gb", "count": 1}}})
TWO_POOLS = laid_over(
    production(),
    {"pools": {"small": {"replicas": 1, "model": {"name": "s", "volume": {"nfs": {"server": "n", "path": "/"}}}}}},
)
ALL: Mapping[str, Mapping[str, Any]] = {
    "one": ONE_MACHINE,
    "plain": PLAIN,
    "secret": SECRET,
    "many": production(),
    "hpa": HPA,
    "mig": MIG,
    "two-pools": TWO_POOLS,
}
CUSTOM = {"ScaledObject", "ServiceMonitor", "PrometheusRule", "Certificate"}
each_kind = pytest.mark.parametrize("values", ALL.values(), ids=ALL.keys())


@each_kind
def test_it_lints_and_its_schema_takes_the_values(values: Mapping[str, Any]) -> None:
    report = helm.lint(str(CHART), dict(values), strict=True)
    assert [m for m in report["messages"] if m["severity"] > 1] == [], report
    assert report["errors"] == []


@each_kind
def test_kubernetes_schemas_take_every_document(values: Mapping[str, Any]) -> None:
    import kubernetes_validate

    for document in documents(values):
        for version in ("1.29", "1.33", "1.37"):
            if document["kind"] not in CUSTOM:
                kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"router": {"replica": 2}}, "replica"),
        ({"tls": {"source": "self"}}, "source"),
        ({"pools": {"default": {"drainSeconds": -1}}}, "drainSeconds"),
        ({"pools": {"default": {"model": {"name": ""}}}}, "pools.default.model.name"),
        ({"pools": {"small": {"model": {"name": "small"}}}}, "pools.small.model.volume"),
        ({"etcd": {"own": False}}, "etcd.endpoints"),
        ({"tls": {"source": "secret"}}, "tls.secretName"),
        ({"tls": {"source": "cert-manager"}}, "tls.issuer"),
    ],
)
def test_what_is_wrong_or_missing_is_said_by_its_name(over: Mapping[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(said)):
        texts(laid_over(ONE_MACHINE, over))


def arguments(words: list[str]) -> list[str]:
    """As the kubelet and the shell fill them in."""
    return [word.replace("$(POD_NAME)", "pod-0") for word in words]


@each_kind
def test_commands_are_settings_of_the_services(values: Mapping[str, Any]) -> None:
    from manylora_router.config import RouterConfig
    from manylora_scheduler.config import SchedulerConfig
    from manylora_shared.process.config import parse
    from manylora_worker.config import WorkerConfig

    kinds: dict[str, type[Any]] = {"router": RouterConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig}
    pods = workloads(values)
    for service in SERVICES:
        found = container(pods[service])
        words = arguments(found["args"])
        if service == "router":
            words.append("--advertise=10-1-2-3.manylora-router.llm.svc:7070")
        env = {each["name"]: each.get("value", "") for each in found["env"]}
        config = parse(kinds[service], words, env)
        ports = {each["name"]: each["containerPort"] for each in found["ports"]}
        assert config.listen == f"0.0.0.0:{ports['grpc']}"
        assert config.advertise.endswith(f":{ports['grpc']}")
        assert config.metrics_listen == f"0.0.0.0:{ports['metrics']}"
        assert (config.tls_files is None) == config.allow_plain_text == (values is PLAIN)
        if service != "scheduler":
            assert pods[service]["terminationGracePeriodSeconds"] > config.drain_s + 10


@each_kind
def test_every_mount_has_its_volume_and_every_named_file_its_mount(values: Mapping[str, Any]) -> None:
    for pod in workloads(values).values():
        found = container(pod)
        mounts = {mount["mountPath"]: mount["name"] for mount in found["volumeMounts"]}
        claims = {"data"} if found["name"] == "etcd" else set()
        assert set(mounts.values()) <= {volume["name"] for volume in pod.get("volumes", [])} | claims
        for path in re.findall(r"=(/(?:run|var)/[^ ,]+)", " ".join(found["args"])):
            assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts), path


@each_kind
def test_pods_are_restricted(values: Mapping[str, Any]) -> None:
    for pod in workloads(values).values():
        context = container(pod)["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert context["readOnlyRootFilesystem"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not pod["automountServiceAccountToken"]
        assert not pod["enableServiceLinks"], "MANYLORA_PORT=tcp://... would be read as a setting"


def test_secrets_stand_in_no_command_and_are_mounted_for_the_group_alone() -> None:
    for pod in workloads(production()).values():
        for volume in pod["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
    assert not [d for d in documents(production()) if d["kind"] == "Secret"], "all are given by reference"
    made = {d["metadata"]["name"] for d in documents(ONE_MACHINE) if d["kind"] == "Secret"}
    assert made == {"manylora-peer", "manylora-operator", "manylora-tls"}


def test_the_certificate_names_every_address_that_is_dialled() -> None:
    certificate = named(production(), "Certificate", "manylora-tls")["spec"]
    names = certificate["dnsNames"]
    dialled = ["10-1-2-3.manylora-router.llm.svc", "manylora.llm.svc", "manylora", "localhost", "llm.example"]
    for service in ("scheduler", "worker"):
        words = arguments(container(workloads(production())[service])["args"])
        (address,) = (word.removeprefix("--advertise=") for word in words if word.startswith("--advertise="))
        dialled.append(address.partition(":")[0])
    etcd = container(workloads(ONE_MACHINE)["scheduler"])["args"]
    dialled += [word.removeprefix("--etcd=").partition(":")[0] for word in etcd if word.startswith("--etcd=")]
    for host in dialled:
        # a wildcard stands for one label
        assert any(fnmatch.fnmatch(host, n) and host.count(".") == n.count(".") for n in names), host


@each_kind
def test_services_and_policies_name_pods_that_are_there(values: Mapping[str, Any]) -> None:
    pods = [d["spec"]["template"] for d in documents(values) if d["kind"] in ("Deployment", "StatefulSet")]

    def chosen(selector: Mapping[str, str]) -> list[Mapping[str, Any]]:
        return [pod for pod in pods if selector.items() <= pod["metadata"]["labels"].items()]

    for document in documents(values):
        match document["kind"]:
            case "Service":
                (pod,) = chosen(document["spec"]["selector"])
                ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
                assert {port["targetPort"] for port in document["spec"]["ports"]} <= ports
            case "PodDisruptionBudget":
                assert len(chosen(document["spec"]["selector"]["matchLabels"])) == 1
            case "StatefulSet":
                assert named(values, "Service", document["spec"]["serviceName"])
            case "HorizontalPodAutoscaler":
                target = document["spec"]["scaleTargetRef"]
                assert "replicas" not in named(values, target["kind"], target["name"])["spec"], "two would set it"
            case "ScaledObject":
                target = document["spec"]["scaleTargetRef"]
                assert "replicas" not in named(values, target["kind"], target["name"])["spec"]
            case "NetworkPolicy":
                pod, *_ = chosen(document["spec"]["podSelector"]["matchLabels"])
                served = {port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]} - {2381}
                allowed = {port["port"] for rule in document["spec"]["ingress"] for port in rule["ports"]}
                assert allowed == served


def test_networks_let_in_whom_a_service_serves() -> None:
    def let_in(component: str, port: int) -> set[str]:
        policy = named(production(), "NetworkPolicy", f"manylora-{component}")
        (rule,) = (rule for rule in policy["spec"]["ingress"] if {"protocol": "TCP", "port": port} in rule["ports"])
        return {each["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for each in rule.get("from", [])}

    assert let_in("scheduler", 7071) == {"router"}
    assert let_in("worker", 7072) == {"router", "scheduler"}
    assert let_in("router", 7070) == set(), "callers come from anywhere, unless they are named"


def test_accelerators_are_asked_for_by_their_resource() -> None:
    assert container(workloads(production())["worker"])["resources"]["limits"]["nvidia.com/gpu"] == 1
    limits = container(workloads(MIG)["worker"])["resources"]["limits"]
    assert limits["nvidia.com/mig-3g.40gb"] == 1
    assert "nvidia.com/gpu" not in limits
    two = laid_over(production(), {"poolDefaults": {"accelerator": {"count": 2}}})
    assert "--tensor-parallel=2" in container(workloads(two)["worker"])["args"]
    assert "--device=cpu" in container(workloads(ONE_MACHINE)["worker"])["args"]


def test_each_pool_has_workers_of_its_own_and_routers_read_all_their_models() -> None:
    router = container(workloads(TWO_POOLS)["router"])
    assert {"--model=/var/lib/manylora/models/default", "--pool-models=small=/var/lib/manylora/models/small"} <= set(
        router["args"]
    )
    assert "/var/lib/manylora/models/small" in {mount["mountPath"] for mount in router["volumeMounts"]}
    small = named(TWO_POOLS, "StatefulSet", "manylora-worker-small")["spec"]
    assert "--pool=small" in container(small["template"]["spec"])["args"]
    scaled = {d["metadata"]["name"]: d["spec"]["triggers"] for d in documents(TWO_POOLS) if d["kind"] == "ScaledObject"}
    (trigger,) = scaled["manylora-worker-small"]
    wanted = Metrics.POOL_WORKERS_WANTED
    assert (wanted.series, [LABELS[name] for name in wanted.labels]) == ("manylora_pool_workers_wanted", ["pool"])
    hpa = named(HPA, "HorizontalPodAutoscaler", "manylora-worker-default")["spec"]["metrics"][0]["external"]["metric"]
    assert hpa == {"name": wanted.series, "selector": {"matchLabels": {"pool": "default"}}}
    assert trigger["metadata"]["query"] == 'max(manylora_pool_workers_wanted{pool="small",namespace="llm"})'


def test_rules_are_the_generated_ones() -> None:
    rules = named(production(), "PrometheusRule", "manylora")
    assert rules["spec"] == yaml.safe_load(boards.RULES.read_text())
    monitor = named(production(), "ServiceMonitor", "manylora")["spec"]
    assert monitor["jobLabel"] == "app.kubernetes.io/name", "its value is the job's name, manylora"
    watched = [
        d for d in documents(production()) if d["kind"] == "Service" and "manylora/metrics" in d["metadata"]["labels"]
    ]
    assert len(watched) == len(SERVICES)


def test_two_machines_or_more_have_what_one_can_lose() -> None:
    values = production()
    assert named(values, "StatefulSet", "manylora-scheduler")["spec"]["replicas"] == 2
    for component, pod in workloads(values).items():
        assert pod["topologySpreadConstraints"], component
    budgets = {
        d["metadata"]["name"]: d["spec"]["maxUnavailable"]
        for d in documents(values)
        if d["kind"] == "PodDisruptionBudget"
    }
    assert budgets == {"manylora-router": 1, "manylora-scheduler": 1, "manylora-worker-default": 1}
    assert not [d for d in documents(values) if d["metadata"]["name"] == "manylora-etcd"]


def test_notes_tell_how_to_get_in() -> None:
    notes = texts(ONE_MACHINE)["NOTES.txt"]
    assert f"kubectl -n {NAMESPACE} get secret manylora-operator -o jsonpath='{{.data.operator\\.key}}'" in notes
    assert "MANYLORA_TLS_CA" in notes
    assert "MANYLORA_TLS_CA" not in texts(PLAIN)["NOTES.txt"]
    assert "manylora-operator" not in texts(production())["NOTES.txt"], "who gave the key has it"
