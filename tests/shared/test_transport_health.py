"""grpc.health.v1 as a service of ours."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from manylora_shared.errors import NotFound
from manylora_shared.transport.health import Health

SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


def handler(health: Health, name: str) -> Any:
    handlers: Any = health.service().handlers
    return handlers[name]


def ask(name: str = "") -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=name)


async def test_one_flag_is_all_services_and_the_servers_own() -> None:
    health = Health(["a.B"])
    for is_serving, status in ((False, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
        health.set_serving(is_serving)
        assert [(await handler(health, "Check")(ask(name), None)).status for name in ("", "a.B")] == [status] * 2
    listed = await handler(health, "List")(health_pb2.HealthListRequest(), None)
    assert {name: each.status for name, each in listed.statuses.items()} == {"": NOT_SERVING, "a.B": NOT_SERVING}


async def test_what_is_not_served_is_not_found_and_watched_as_unknown() -> None:
    health = Health(["a.B"])
    with pytest.raises(NotFound, match=r"x\.Y"):
        await handler(health, "Check")(ask("x.Y"), None)
    watch = handler(health, "Watch")(ask("x.Y"), None)
    assert (await anext(watch)).status == UNKNOWN


async def test_watchers_hear_of_each_change_once() -> None:
    health = Health([])
    watch = handler(health, "Watch")(ask(), None)
    assert (await anext(watch)).status == NOT_SERVING
    following = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    health.set_serving(False)
    await asyncio.sleep(0)
    assert not following.done(), "nothing changed"
    health.set_serving(True)
    assert (await following).status == SERVING
