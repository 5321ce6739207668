"""The audit log, read out by who may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manylora.v1 import admin_pb2
from manylora_shared.audit.entries import parse
from manylora_shared.audit.verify import Segment, verify
from manylora_shared.coordination.records import AuditHeadRecord, RouterRecord
from router_fakes import ADMIN, KeyedChannel, RouterCluster, audit_log, audited_cluster, simulate, until

CREATE = ADMIN["CreateKey"]


async def read(channel: KeyedChannel, **fields: Any) -> tuple[list[Any], list[Segment], list[str]]:
    stream = channel.stream(ADMIN["ReadAudit"], admin_pb2.ReadAuditRequest(**fields))
    heads, parts, silent = list[Any](), dict[tuple[str, int], bytes](), list[str]()
    while (answer := await stream.read()) is not None:
        heads += answer.heads
        if answer.HasField("part"):
            name = (answer.part.chain, answer.part.number)
            parts[name] = parts.get(name, b"") + answer.part.data
        silent += [answer.silent_router_id] if answer.silent_router_id else []
    return heads, [Segment(*name, data) for name, data in parts.items()], silent


async def test_heads_come_first_and_the_files_go_at_least_as_far(tmp_path: Path) -> None:
    async with audited_cluster(tmp_path) as cluster:
        for _ in range(5):
            await cluster.client.call(CREATE, CREATE.request_type(role="viewer"))
        heads, segments, silent = await read(cluster.client)
        assert silent == []
        (head,) = heads
        values = {each.name: getattr(head, each.name) for each in head.DESCRIPTOR.fields}
        (report,) = verify(segments, {head.chain: AuditHeadRecord(**values)})
        assert report.problems == []
        assert report.entries >= 6
        assert head.service == "router-0"
        _, last, _ = await read(cluster.client, last=2)
        assert [parse(line).seq for line in last[0].data.splitlines()] == [report.entries - 1, report.entries]
        assert (await read(cluster.client, local_only=True))[0] == []


async def test_what_other_routers_have_is_told_too_and_who_is_silent(tmp_path: Path) -> None:
    async with audited_cluster(tmp_path / "a") as cluster:
        elsewhere = audit_log(tmp_path / "b", cluster.store_server, cluster.clock)
        await elsewhere.start("router-1")
        await elsewhere.stop()
        record = RouterRecord(router_id="router-1", address="10.9.9.9:1")
        await cluster.store.put(record.key, record.to_json())
        await until(lambda: "router-1" in cluster.app.directory.routers)
        heads, segments, silent = await read(cluster.client)
        assert sorted(head.service for head in heads) == ["router-0", "router-1"]
        assert len(segments) == 1
        assert silent == ["router-1"]


def test_a_router_without_a_log_tells_the_heads() -> None:
    async def test(cluster: RouterCluster) -> None:
        assert await read(cluster.client) == ([], [], [])

    simulate(test)
