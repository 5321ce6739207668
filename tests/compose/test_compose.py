"""docker-compose.yml as it stands: the images are built, the cluster is run and checked from outside, and taken down.

Needs a Docker engine and docker-compose (1.29 or v2), and fails without them: `make compose-test` is asked for by name.
The tests share one cluster and run in their order; the last one kills a worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from manylora.client import Client, ClusterStatus, RequestFailed, Sampling
from manylora.demo import measure, skills
from manylora_shared.coordination.binary import free_port
from manylora_shared.telemetry import Attribute, SpanName
from otlp_receiver import ReceivedSpan, Receiver

ROOT = Path(__file__).resolve().parents[2]
FILES = ["docker-compose.yml", "tests/compose/otlp.yml"]
OURS = ["etcd", "scheduler", "scheduler-standby", "router", "worker-0", "worker-1"]
IMAGE_PREFIX, IMAGE_TAG = "manylora", "compose-test"
BUILD_TIMEOUT_S = 1500
START_TIMEOUT_S = 300
EXPORT_TIMEOUT_S = 20
RECOVERY_TIMEOUT_S = 60

pytestmark = pytest.mark.compose


class Silent:
    """The demo's run, not shown."""

    def title(self, text: str) -> None:
        pass

    def begin(self, stream: int, sender: measure.DemoTenant, text: str) -> None:
        pass

    def append(self, stream: int, text: str) -> None:
        pass

    def end(self, stream: int, *, expected: bool) -> None:
        pass


@dataclass(frozen=True)
class Engine:
    """docker and docker-compose for one project."""

    command: tuple[str, ...]
    project: str
    env: dict[str, str]

    def compose(self, *arguments: str, timeout_s: float = 120, check: bool = True) -> str:
        files = [word for file in FILES for word in ("-f", file)]
        return self._run([*self.command, "-p", self.project, *files, *arguments], timeout_s, check)

    def docker(self, *arguments: str, timeout_s: float = 120) -> str:
        return self._run(["docker", *arguments], timeout_s, check=True)

    def container(self, service: str) -> str:
        (found,) = self.compose("ps", "-q", service).split()
        return found

    def _run(self, command: list[str], timeout_s: float, check: bool) -> str:
        done = subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode != 0:
            pytest.fail(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return done.stdout


@dataclass(frozen=True)
class Cluster:
    engine: Engine
    server: str
    http: str
    receiver: Receiver
    key: str
    """The operator's."""
    tls_ca: Path

    def client(self, **more: Any) -> Client:
        return Client(self.server, **{"key": self.key, "tls_ca": str(self.tls_ca), **more})


def find_compose() -> tuple[str, ...]:
    if shutil.which("docker") is None:
        pytest.fail("the compose test needs a Docker engine: there is no docker command")
    reached = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=60, check=False)
    if reached.returncode != 0:
        pytest.fail(f"the compose test needs a Docker engine: docker info: {reached.stderr.strip()}")
    for command in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(command[0]) is not None:
            version = subprocess.run([*command, "version"], capture_output=True, timeout=60, check=False)
            if version.returncode == 0:
                return command
    pytest.fail("the compose test needs docker-compose 1.29 or newer, or Docker's compose plugin")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    command = find_compose()
    receiver = Receiver()
    port, http_port = free_port(), free_port()
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MANYLORA_", "COMPOSE_"))},
        "MANYLORA_MODEL": "./shared/manylora/demo/assets/base",
        "MANYLORA_MODEL_NAME": "manylora-demo-base",
        "MANYLORA_IMAGE_PREFIX": IMAGE_PREFIX,
        "MANYLORA_TAG": IMAGE_TAG,
        "MANYLORA_BUILD_NETWORK": os.environ.get("MANYLORA_BUILD_NETWORK", "host"),
        "MANYLORA_PIP_EXTRA_INDEX_URL": os.environ.get("PIP_EXTRA_INDEX_URL", ""),
        "MANYLORA_PORT": str(port),
        "MANYLORA_HTTP_PORT": str(http_port),
        "MANYLORA_OTLP_ENDPOINT": f"host.docker.internal:{receiver.port}",
    }
    engine = Engine(command, f"manylora-test-{secrets.token_hex(4)}", env)
    try:
        engine.compose("build", timeout_s=BUILD_TIMEOUT_S)
        up = ("up", "--detach", "--no-build")
        engine.compose(*up, timeout_s=START_TIMEOUT_S)
        wait_until_healthy(engine)
        key = engine.compose("exec", "-T", "router", "cat", "/var/lib/manylora/keys/operator.key").strip()
        tls_ca = tmp_path_factory.mktemp("tls") / "ca.pem"
        tls_ca.write_text(engine.compose("exec", "-T", "router", "cat", "/var/lib/manylora/tls/ca.pem"))
        yield Cluster(engine, f"127.0.0.1:{port}", f"127.0.0.1:{http_port}", receiver, key, tls_ca)
    except BaseException:
        print(engine.compose("logs", "--no-color", "--tail=60", check=False))
        raise
    finally:
        engine.compose("down", "--volumes", "--remove-orphans", "--timeout=5", check=False)
        receiver.close()


def wait_until_healthy(engine: Engine) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        health = {name: json.loads(inspect(engine, name, "{{json .State}}"))["Health"]["Status"] for name in OURS}
        if set(health.values()) == {"healthy"}:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"not healthy in {START_TIMEOUT_S} s: {health}")
        time.sleep(1)


def inspect(engine: Engine, service: str, template: str) -> str:
    return engine.docker("inspect", "--format", template, engine.container(service)).strip()


def test_images_are_slim_and_run_as_an_ordinary_user(cluster: Cluster) -> None:
    has = "import importlib.util as u; print(*(name for name in ('torch', 'manylora_sim') if u.find_spec(name)))"
    for service, expected in (("router", ""), ("scheduler", ""), ("worker-0", "torch")):
        container = cluster.engine.container(service)
        assert cluster.engine.docker("exec", container, "python", "-c", has).strip() == expected
    for service in OURS:
        assert cluster.engine.docker("exec", cluster.engine.container(service), "id", "-u").strip() == "10001"


def test_the_scheduler_decides_by_compiled_code(cluster: Cluster) -> None:
    use = "from manylora_shared.process import compiled; print(repr(compiled.use()))"
    container = cluster.engine.container("scheduler")
    assert cluster.engine.docker("exec", container, "python", "-c", use).strip() == "''"
    has_compiler = "import shutil; print(shutil.which('gcc'))"
    assert cluster.engine.docker("exec", container, "python", "-c", has_compiler).strip() == "None"


def test_only_the_router_is_published_and_on_loopback_only(cluster: Cluster) -> None:
    for service in OURS:
        ports = json.loads(inspect(cluster.engine, service, "{{json .NetworkSettings.Ports}}"))
        published = {(each["HostIp"], each["HostPort"]) for bindings in ports.values() for each in bindings or []}
        of_router = {("127.0.0.1", address.rpartition(":")[2]) for address in (cluster.server, cluster.http)}
        assert published == (of_router if service == "router" else set()), service


def test_the_router_speaks_openais_api(cluster: Cluster) -> None:
    context = ssl.create_default_context(cafile=cluster.tls_ca)
    with urllib.request.urlopen(f"https://{cluster.http}/ready", timeout=10, context=context) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(f"https://{cluster.http}/v1/models", timeout=10, context=context)
    raised.value.close()
    assert raised.value.code == 401


async def test_nobody_calls_without_a_key_or_past_the_router(cluster: Cluster) -> None:
    async with cluster.client(key="") as client:
        with pytest.raises(RequestFailed) as raised:
            await client.status()
        assert raised.value.code == "UNAUTHENTICATED"
    assert asked_scheduler(cluster, "grpc.insecure_channel('scheduler:7071')") == "UNAVAILABLE"
    assert asked_scheduler(cluster, "secure(ca)") == "UNAVAILABLE"
    assert asked_scheduler(cluster, "secure(ca, key, cert)") == "UNAUTHENTICATED"


def asked_scheduler(cluster: Cluster, channel: str) -> str:
    """What the scheduler answers to who is on the containers' network, and does not know the peers' secret."""
    probe = (
        "import grpc, pathlib\n"
        "folder = pathlib.Path('/var/lib/manylora/tls')\n"
        "ca, key, cert = ((folder / name).read_bytes() for name in ('ca.pem', 'service.key', 'service.pem'))\n"
        "secure = lambda *of: grpc.secure_channel('scheduler:7071', grpc.ssl_channel_credentials(*of))\n"
        f"channel = {channel}\n"
        "try: channel.unary_unary('/manylora.v1.SchedulerService/GetSchedulerStatus')(b'', timeout=10)\n"
        "except grpc.RpcError as e: print(e.code().name)"
    )
    return cluster.engine.docker("exec", cluster.engine.container("router"), "python", "-c", probe).strip()


def test_metrics_and_etcd_are_read_over_tls_alone(cluster: Cluster) -> None:
    probe = (
        "import ssl, sys, urllib.request\n"
        "context = ssl.create_default_context(cafile='/var/lib/manylora/tls/ca.pem')\n"
        "try: print(urllib.request.urlopen(sys.argv[1], timeout=10, context=context).status)\n"
        "except OSError as e: print('refused')"
    )
    container = cluster.engine.container("router")
    for url, expected in {
        "https://worker-0:9464/metrics": "200",
        "https://scheduler:9464/metrics": "200",
        "http://worker-0:9464/metrics": "refused",
        "https://etcd:2379/version": "refused",  # without a certificate of one's own
        "http://etcd:2379/version": "refused",
    }.items():
        assert cluster.engine.docker("exec", container, "python", "-c", probe, url).strip() == expected, url


async def test_four_tenants_get_their_own_adapters_answers(cluster: Cluster) -> None:
    async with cluster.client() as client:
        status = await client.status()
        assert sorted(worker.worker_id for worker in status.workers) == ["worker-0", "worker-1"]
        versions = await measure.set_up(client)
        report = await measure.run(client, Silent(), versions)
    assert report.ok, report
    assert len(report.tenants) == 4
    for row in report.tenants:
        assert row.exact_match >= 0.95, row
        assert row.cross_exact_match < 0.05, row
    assert set(report.requests_by_worker) == {"worker-0", "worker-1"}, report.requests_by_worker


async def test_a_foreign_adapter_is_answered_like_one_that_is_not_there(cluster: Cluster) -> None:
    mine, other = measure.TENANTS[:2]
    failures = []
    async with cluster.client(tenant=mine.tenant) as client:
        for adapter in (other.skill.adapter, "nowhere"):
            with pytest.raises(RequestFailed) as raised:
                await client.complete(skills.prompt("ab3"), adapter=adapter)
            failures.append((raised.value.code, str(raised.value).replace(adapter, "<adapter>")))
    assert failures[0] == failures[1]
    assert failures[0][0] == "NOT_FOUND"


async def test_a_request_is_one_trace_over_three_services(cluster: Cluster) -> None:
    sampling = Sampling(temperature=0)
    requests = {}
    for tenant in measure.TENANTS:
        async with cluster.client(tenant=tenant.tenant) as client:
            prompt = skills.prompt("ab3")
            result = await client.complete(
                prompt, adapter=tenant.skill.adapter, qos_class="interactive", max_tokens=32, sampling=sampling
            )
            requests[result.request_id] = tenant
    traces = await received_traces(cluster.receiver, set(requests))
    assert len({trace[0].trace_id for trace in traces.values()}) == len(requests)
    for request_id, trace in traces.items():
        assert {span.service for span in trace} == {"manylora-router", "manylora-scheduler", "manylora-worker"}
        names = {span.name for span in trace}
        assert {SpanName.REQUEST, SpanName.QUEUE_WAIT, SpanName.QUEUE, SpanName.PLACEMENT} <= names
        assert {SpanName.EXECUTE, SpanName.PREFILL, SpanName.DECODE} <= names
        ids = {span.span_id for span in trace}
        roots = [span for span in trace if not span.parent_id]
        assert [root.name for root in roots] == [SpanName.REQUEST]
        assert all(span.parent_id in ids for span in trace if span not in roots)
        for span in trace:
            assert span.attributes[Attribute.TENANT_ID] == requests[request_id].tenant
            assert span.attributes[Attribute.QOS_CLASS] == "interactive"
            assert span.attributes[Attribute.ADAPTER_ID] == requests[request_id].skill.adapter


async def received_traces(receiver: Receiver, request_ids: set[str]) -> dict[str, list[ReceivedSpan]]:
    """All spans of the requests' traces, once each trace's root and parts of all three services have come."""
    deadline = time.monotonic() + EXPORT_TIMEOUT_S
    while True:
        by_trace: dict[str, list[ReceivedSpan]] = {}
        for span in receiver.spans():
            by_trace.setdefault(span.trace_id, []).append(span)
        found = {
            str(root.attributes.get(Attribute.REQUEST_ID)): trace
            for trace in by_trace.values()
            for root in trace
            if root.name == SpanName.REQUEST
        }
        ready = {id_: found[id_] for id_ in request_ids if id_ in found and len({s.service for s in found[id_]}) == 3}
        if ready.keys() == request_ids:
            await asyncio.sleep(2)
            return {id_: [s for s in receiver.spans() if s.trace_id == t[0].trace_id] for id_, t in ready.items()}
        if time.monotonic() > deadline:
            pytest.fail(f"of {len(request_ids)} traces {len(ready)} came whole in {EXPORT_TIMEOUT_S} s")
        await asyncio.sleep(0.2)


async def test_a_killed_worker_is_replaced_by_the_other_and_comes_back(cluster: Cluster) -> None:
    tenant = measure.TENANTS[0]
    victim = cluster.engine.container("worker-1")
    async with cluster.client(tenant=tenant.tenant) as client:
        cluster.engine.docker("kill", "--signal=KILL", victim)
        results = await asyncio.gather(
            *(
                client.complete(skills.prompt(text), adapter=tenant.skill.adapter, sampling=Sampling(temperature=0))
                for text in skills.held_out_inputs(7, 8)
            )
        )
        assert {result.worker_id for result in results} == {"worker-0"}
        assert [r.text for r in results] == [tenant.skill.answer(text) for text in skills.held_out_inputs(7, 8)]
        await until(client, {"worker-0"})
        cluster.engine.docker("start", victim)
        await until(client, {"worker-0", "worker-1"})


async def until(client: Client, workers: set[str]) -> None:
    """Returns once exactly these workers are connected."""
    deadline = time.monotonic() + RECOVERY_TIMEOUT_S
    while True:
        status: ClusterStatus = await client.status()
        connected = {worker.worker_id for worker in status.workers if worker.connected}
        if connected == workers:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"connected after {RECOVERY_TIMEOUT_S} s: {connected}")
        await asyncio.sleep(0.5)
