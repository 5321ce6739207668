"""The chart's own commands, probes and preStop, taken out of what Helm renders, against real processes on loopback.

What a machine without Kubernetes lacks is put in its place: ports, mounts, names of pods. The workers' model is a fake.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from manylora.client import Client, RetryPolicy
from manylora.demo import BASE_FOLDER
from manylora_shared.coordination.binary import find_etcd, free_port

from tests.helm_chart import container, documents, workloads

pytest.importorskip("helm_python", reason="Helm's SDK has wheels for Linux on x86-64 alone")
pytestmark = [pytest.mark.e2e, pytest.mark.wide]

VALUES: Mapping[str, Any] = {
    "router": {"leaveSeconds": 2, "drainSeconds": 20},
    "pools": {"default": {"model": {"name": "fake", "folder": str(BASE_FOLDER)}, "drainSeconds": 10, "replicas": 2}},
}
ENTRYPOINTS = {"scheduler": ["-m", "manylora_scheduler"], "worker": ["-m", "manylora_sim.worker"]}
PROMPT = [5, 6, 7]
ONCE = RetryPolicy(max_attempts=1)


@dataclass
class Pod:
    """One pod's container, as the kubelet has it."""

    name: str
    spec: Mapping[str, Any]
    folder: Path
    etcd_port: int
    ports: dict[int, int] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None

    def __post_init__(self) -> None:
        self.container = container(self.spec)
        named = {each["name"]: each["containerPort"] for each in self.container["ports"]}
        self.ports = {port: free_port() for port in named.values()}
        if "client" in named:
            self.ports[named["client"]] = self.etcd_port
        self.named = {name: self.ports[port] for name, port in named.items()}

    @property
    def environment(self) -> Mapping[str, str]:
        folders = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(self.folder)}
        return {**os.environ, **folders, "POD_NAME": self.name, "POD_IP": "127.0.0.1"}

    def filled_in(self, word: str) -> str:
        word = word.replace("$(POD_NAME)", self.name)
        word = re.sub(r"(/run|/var/lib)/manylora", lambda found: f"{self.folder}{found[0]}", word)
        word = re.sub(r"^--etcd=.*", f"--etcd=localhost:{self.etcd_port}", word)
        ours = "|".join(str(port) for port in self.ports)
        return re.sub(rf"(=|//)[\w.-]+:({ours})$", lambda f: f"{f[1]}127.0.0.1:{self.ports[int(f[2])]}", word)

    async def start(self) -> None:
        module = ENTRYPOINTS.get(self.container["name"])
        command = self.container.get("command") or [sys.executable, *(module or [])]
        if command[0] == "etcd":
            command = [str(find_etcd()), "--listen-peer-urls=http://127.0.0.1:0"]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(self.filled_in(word) for word in [*command, *self.container["args"]]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                process_group=0,
            )

    async def runs(self, probe: Mapping[str, Any]) -> bool:
        """Once, as the kubelet does: within its time, a status below 400 or an exit code of 0."""
        timeout_s = probe.get("timeoutSeconds", 1) + 4  # a busy machine
        if "httpGet" in probe:
            return await asyncio.to_thread(self._get, probe["httpGet"], timeout_s)
        if "tcpSocket" in probe:
            _, writer = await asyncio.open_connection("127.0.0.1", self.named[probe["tcpSocket"]["port"]])
            writer.close()
            return True
        return await self.executes(probe["exec"]["command"], timeout_s)

    def _get(self, get: Mapping[str, Any], timeout_s: float) -> bool:
        unchecked = ssl._create_unverified_context()  # the kubelet does not check certificates
        url = f"{get.get('scheme', 'HTTP').lower()}://127.0.0.1:{self.named[get['port']]}{get['path']}"
        try:
            with urllib.request.urlopen(url, timeout=timeout_s, context=unchecked) as answer:
                return bool(answer.status < 400)
        except (OSError, urllib.error.HTTPError):
            return False

    async def executes(self, command: Sequence[str], timeout_s: float) -> bool:
        words = [sys.executable if word == "python" else self.filled_in(word) for word in command]
        words = [re.sub(r"^localhost:(\d+)$", lambda f: f"localhost:{self.ports[int(f[1])]}", word) for word in words]
        process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.DEVNULL, env=self.environment)
        try:
            return await asyncio.wait_for(process.wait(), timeout_s) == 0
        except TimeoutError:
            process.kill()
            await process.wait()
            return False

    async def becomes(self, probe: str) -> None:
        async with asyncio.timeout(60):
            while not await self.runs(self.container[probe]):
                assert self.process is not None
                assert self.process.returncode is None, (self.folder / f"{self.name}.log").read_text()[-2000:]
                await asyncio.sleep(0.05)

    async def ends(self) -> float:
        """As the kubelet ends a pod: preStop, SIGTERM, and it has the rest of its grace. Seconds since SIGTERM."""
        began = time.monotonic()
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            assert await self.executes(hook["exec"]["command"], 60)
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        left_s = self.spec["terminationGracePeriodSeconds"] - (sent - began)
        assert await asyncio.wait_for(self.process.wait(), left_s) == 0
        return time.monotonic() - sent


def mount_secrets(folder: Path) -> None:
    data = {d["metadata"]["name"]: d["data"] for d in documents(VALUES) if d["kind"] == "Secret"}
    for name, place in (("peer", "peer"), ("operator", "operator"), ("tls", "tls")):
        mounted = folder / "run/manylora" / place
        mounted.mkdir(parents=True)
        for file, value in data[f"manylora-{name}"].items():
            (mounted / file).write_bytes(base64.b64decode(value))
            (mounted / file).chmod(0o440)
    (folder / "var/lib/manylora/adapters").mkdir(parents=True)
    (folder / "var/lib/manylora/etcd").mkdir(parents=True)


@asynccontextmanager
async def pods(folder: Path) -> AsyncIterator[dict[str, Pod]]:
    mount_secrets(folder)
    specs, port = workloads(VALUES), free_port()
    names = ("etcd", "scheduler-0", "scheduler-1", "router", "worker-0", "worker-1")
    found = {name: Pod(name, specs[name.partition("-")[0]], folder, port) for name in names}
    try:
        yield found
    finally:
        for pod in found.values():
            if pod.process is not None and pod.process.returncode is None:
                pod.process.kill()
                await pod.process.wait()


def client_of(pod: Pod, folder: Path) -> Client:
    run = folder / "run/manylora"
    key = (run / "operator/operator.key").read_text()
    address = f"localhost:{pod.named['grpc']}"
    return Client(address, tenant="acme", key=key, retry=ONCE, tls_ca=str(run / "tls/ca.crt"))


async def test_probes_and_ends_are_what_the_services_know(tmp_path: Path) -> None:
    async with pods(tmp_path) as cluster:
        router, worker, other = cluster["router"], cluster["worker-0"], cluster["worker-1"]
        assert not await worker.runs(worker.container["startupProbe"]), "nothing is there yet"
        for pod in cluster.values():
            if pod not in (worker, other):
                await pod.start()
        for name in ("etcd", "scheduler-0", "scheduler-1"):
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                await cluster[name].becomes(probe)
        await router.becomes("startupProbe")
        assert await router.runs(router.container["livenessProbe"])
        assert not await router.runs(router.container["readinessProbe"]), "it is ready before a worker is there"
        await worker.start()
        await other.start()
        for pod in (worker, other, router):
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                await pod.becomes(probe)

        os.kill(worker.process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
        assert not await worker.runs(worker.container["livenessProbe"]), "a process that stands still is alive"
        os.kill(worker.process.pid, signal.SIGCONT)  # type: ignore[union-attr]
        await worker.becomes("livenessProbe")

        async with client_of(router, tmp_path) as client:
            await client.tenants.apply("tenant_id: acme")

            async def answer(tokens: int) -> tuple[str, int, bool]:
                result = await client.complete(PROMPT, max_tokens=tokens, ignore_eos=True, timeout_s=60)
                return str(result.outcome), len(result.token_ids), bool(result.usage.resumed)

            # a worker's SIGTERM is its drain: what runs goes on at the other one
            long = [asyncio.create_task(answer(600)) for _ in range(8)]
            await asyncio.sleep(1)
            assert await worker.ends() < 10
            ended = await asyncio.gather(*long)
            assert {each[:2] for each in ended} == {("completed", 600)}
            assert any(resumed for _, _, resumed in ended)

            # whichever scheduler leads, the other one follows
            assert await cluster["scheduler-0"].ends() < 10
            assert (await answer(2))[0] == "completed"
            assert await router.runs(router.container["readinessProbe"])

            # a router serves on while its preStop waits, and lets what runs end after SIGTERM
            long = [asyncio.create_task(answer(500)) for _ in range(4)]
            ending = asyncio.create_task(router.ends())
            await asyncio.sleep(0.5)
            assert (await answer(2))[0] == "completed", "it takes requests during its preStop"
            assert await asyncio.gather(*long) == [("completed", 500, False)] * 4
            await ending
