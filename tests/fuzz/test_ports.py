"""Every port of a running cluster, by its own schemas and by bytes: nothing fails as the service's fault, hangs, grows
or dies, and right after it all the cluster answers as before. `make fuzz-ports` does more of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from manylora.client import Client, Sampling
from manylora.client.credentials import read_key
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder, skills
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora.v1 import admin_pb2, answers_pb2, bundle_pb2, data_pb2, inference_pb2, scheduler_pb2, worker_pb2
from manylora_router.front.http.openapi import document
from manylora_shared.coordination.peers import read_secret
from manylora_shared.metadata import PEER_KEY
from schemathesis.checks import (
    content_type_conformance,
    load_all_checks,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.messages import Drawing, broken

pytestmark = [pytest.mark.e2e, pytest.mark.wide, pytest.mark.asyncio(loop_scope="module")]

MAX_GROWTH_BYTES = 400 << 20
CALL_S = 15.0
STAY_S = 0.2  # what is open as long as the caller likes
NEVER = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
STAYING = {"Schedule", "Control", "Carry"}
ENDING = {"Drain", "LeavePool", "Resign"}  # a service, where those ask who may
SERVICES = {
    "router-0": (inference_pb2, "InferenceService"),
    "router-0/admin": (admin_pb2, "AdminService"),
    "router-0/data": (data_pb2, "DataService"),
    "router-0/answers": (answers_pb2, "AnswerService"),
    "scheduler": (scheduler_pb2, "SchedulerService"),
    "worker-0": (worker_pb2, "WorkerService"),
    "scheduler/bundle": (bundle_pb2, "BundleService"),
    "worker-0/bundle": (bundle_pb2, "BundleService"),
}
RPCS = [
    (where, method.name)
    for where, (module, service) in SERVICES.items()
    for method in module.DESCRIPTOR.services_by_name[service].methods
]
PATHS = {
    f"/{module.DESCRIPTOR.package}.{service}/{method.name}"
    for module, service in SERVICES.values()
    for method in module.DESCRIPTOR.services_by_name[service].methods
}
WORDS = ("acme", "upper", "upper@1", BASE_NAME, "https://127.0.0.1:9/x", "hf://a/b", "objects", "generate", *PATHS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    options = ClusterOptions(
        model=BASE_FOLDER, model_name=BASE_NAME, data=tmp_path_factory.mktemp("ports"), http_port=0, kv_cache_mb=64
    )
    async with LocalCluster(options) as running:
        async with Client(running.router, key=read_key(running.key_file)) as client:
            for tenant in ("acme", "kept"):  # what is drawn knows the first one's name
                await client.tenants.apply(f"tenant_id: {tenant}\n")
                await client.adapters.add(tenant, "upper", adapter_folder("upper"))
        yield running


class Watch:
    """What must be the same afterwards."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._pids = {name: child.pid for name, child in cluster.children.items()}
        self._bytes = self._sizes()

    def _sizes(self) -> dict[str, int]:
        return {name: psutil.Process(pid).memory_info().rss for name, pid in self._pids.items()}

    async def check(self) -> None:
        assert {name: child.pid for name, child in self._cluster.children.items()} == self._pids
        for name, size in self._sizes().items():
            assert size - self._bytes[name] < MAX_GROWTH_BYTES, name
        async with Client(self._cluster.router, key=read_key(self._cluster.key_file), tenant="kept") as client:
            answer = await client.complete(
                skills.prompt("ab3"), adapter="upper", sampling=Sampling(temperature=0), timeout_s=30
            )
            assert answer.text == "AB3"


@pytest.fixture
def fuzz_examples(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fuzz-examples"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watch(cluster: LocalCluster) -> Watch:
    return Watch(cluster)


@pytest_asyncio.fixture(loop_scope="module")
async def watched(cluster: LocalCluster, watch: Watch) -> AsyncIterator[LocalCluster]:
    yield cluster
    await watch.check()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keys(cluster: LocalCluster) -> list[tuple[tuple[str, str], ...]]:
    """As metadata: none, wrong ones, a tenant's, the operator's, the services' own."""
    operator = read_key(cluster.key_file)
    async with Client(cluster.router, key=operator) as client:
        tenants = (await client.keys.create(["generate", "admin"], tenant="acme"))[0]
    return [
        (),
        (("authorization", "Bearer mlk-0011223344556677-" + "0" * 32), (PEER_KEY, "wrong")),
        (("authorization", f"Bearer {tenants}"),),
        (("authorization", f"Bearer {operator}"), ("x-tenant-id", "acme")),
        (("authorization", f"Bearer {operator}"), (PEER_KEY, read_secret(cluster.peer_secret_file))),
    ]


@pytest.mark.parametrize(("where", "name"), RPCS, ids=lambda text: text)
async def test_every_rpc(watched: LocalCluster, keys: Any, where: str, name: str, fuzz_examples: int) -> None:
    module, service = SERVICES[where]
    method = module.DESCRIPTOR.services_by_name[service].methods_by_name[name]
    rng = random.Random(f"{where}{name}")
    # Commands of a true leader's epoch or a later one take the worker away from it: a peer can do that.
    epochs: dict[str, Callable[[], Any]] = {
        "manylora.v1.ControlHello.epoch": lambda: rng.choice((0, 1)),
        "manylora.v1.GenerateRequest.max_tokens": lambda: rng.choice((0, 1, 5, 1 << 31)),
        "manylora.v1.ExecuteRequest.max_tokens": lambda: rng.choice((0, 1, 5, 1 << 31)),
    }
    drawing = Drawing(rng, WORDS, epochs)
    path = f"/{method.containing_service.full_name}/{name}"
    address = str(watched.children[where.partition("/")[0]].ready["address"])
    async with grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        call = channel.stream_stream(path)
        for metadata in keys[:3] if name in ENDING else keys:
            for _ in range(fuzz_examples):
                count = rng.choice((1, 1, 3)) if method.client_streaming else 1
                sent = [drawing.message(method.input_type).SerializeToString() for _ in range(count)]
                await answered(call, sent, metadata, name)
            valid = drawing.message(method.input_type).SerializeToString()
            for data in (b"", *broken(valid, rng), b"\0" * (5 << 20)):
                await answered(call, [data], metadata, name)


async def answered(call: Any, sent: list[bytes], metadata: Any, name: str) -> None:
    """Raises AssertionError where it is not as it should be."""
    stream = call(iter(sent), metadata=metadata, timeout=STAY_S if name in STAYING else CALL_S)
    code, details = grpc.StatusCode.OK, ""
    try:
        async for _ in stream:
            pass
    except grpc.aio.AioRpcError as e:
        code, details = e.code(), e.details() or ""
    is_ours = "from Core" in details  # the call was over before all was sent
    if is_ours or (name in STAYING and code is grpc.StatusCode.DEADLINE_EXCEEDED):
        return
    assert code not in NEVER, (name, code, details, dict(metadata).keys(), sent[0][:2000])


load_all_checks()
SCHEMA: Any = schemathesis.openapi.from_dict(dict(document()))
OPERATIONS = {result.ok().label: result.ok() for result in SCHEMA.get_all_operations()}
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
HTTP_KEYS = ("authorization", "x-tenant-id")


@pytest.mark.parametrize("label", OPERATIONS)
async def test_every_route(watched: LocalCluster, keys: Any, label: str, fuzz_examples: int) -> None:
    headers = [{name: value for name, value in given if name in HTTP_KEYS} for given in keys]
    await asyncio.to_thread(fuzz_route, f"http://{watched.http_addresses[0]}", label, headers, fuzz_examples * 6)


def fuzz_route(url: str, label: str, keys: list[dict[str, str]], examples: int) -> None:
    modes = schemathesis.GenerationMode
    takes_anything = "parameters" in OPERATIONS[label].definition.raw
    for mode in (modes.POSITIVE, modes.NEGATIVE)[: 1 + takes_anything]:
        cases = OPERATIONS[label].as_strategy(generation_mode=mode)

        @settings(
            max_examples=examples,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def send(case: Any) -> None:
            chosen = zlib.crc32(repr(case.body).encode("utf-8", "replace"))
            headers = dict(keys[2 if chosen % 4 else chosen // 4 % len(keys)])
            if isinstance(case.body, dict) and "model" in case.body and chosen % 3:
                case.body["model"] = ("upper", BASE_NAME)[chosen % 2]
            if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), int):
                case.body["max_tokens"] = min(case.body["max_tokens"], 20)
            if chosen % 5:
                case.headers.clear()  # most of them are refused
            response = case.call(base_url=url, headers=headers, timeout=CALL_S)
            if not is_stream(response.headers):
                case.validate_response(response, checks=CHECKS)
            assert response.status_code in (200, 503) or 400 <= response.status_code < 500, (response, response.content)

        send()


def is_stream(headers: Mapping[str, Any]) -> bool:
    return any("text/event-stream" in str(value) for value in headers.get("content-type", ()))


def garbage(rng: random.Random) -> Iterator[bytes]:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings_frame = b"\0\0\0\x04\0\0\0\0\0"
    yield b""
    yield rng.randbytes(2000)
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500)  # TLS
    yield preface + rng.randbytes(500)
    for kind in range(12):
        yield preface + settings_frame + b"\0\0\x20" + bytes([kind, rng.randrange(256)]) + rng.randbytes(4 + 32)
    for line in (b"GET / HTTP/9.9", b"POST /v1/completions HTTP/1.1", b"G" * 70_000, b"OPTIONS * HTTP/1.1"):
        yield line + b"\r\ncontent-length: -1\r\n\r\n"
        yield line + b"\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n"
        yield line + b"\r\nhost: x\r\n" + b"a: " + rng.randbytes(200) + b"\r\n\r\n"


async def test_garbage_on_every_port(watched: LocalCluster, fuzz_examples: int) -> None:
    rng = random.Random(1)
    addresses = [str(child.ready["address"]) for child in watched.children.values() if "address" in child.ready]
    addresses += [*watched.http_addresses, *watched.metrics_addresses.values()]
    for address in addresses:
        host, _, port = address.rpartition(":")
        for data in itertools.chain.from_iterable(garbage(rng) for _ in range(fuzz_examples)):
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(data)
                    writer.write_eof()
                    async with asyncio.timeout(0.5):
                        await reader.read(4096)
                finally:
                    writer.close()
