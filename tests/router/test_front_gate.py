"""The gate before every gRPC call: strangers' bytes are not read, and no tenant takes everybody's places."""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from manylora.v1 import inference_pb2
from manylora_router.front.gate import MAX_REQUEST_BYTES, Bounds, Gate, OwnBounds, Pass
from manylora_router.front.grpc import tenant_of
from manylora_router.front.pace import bytes_pace
from manylora_router.links.callers import Callers
from manylora_shared.errors import Code, PermissionDenied, RpcError, Unauthenticated
from manylora_shared.tenancy.identity import NewKey, bearer, new_key
from manylora_shared.transport import handling
from manylora_shared.transport.base import Channel, Service, Stream, methods_of
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_shared.transport.places import Pace, Places
from manylora_sim.clock import FakeClock
from router_fakes import until

DESCRIPTOR = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
METHODS = methods_of(DESCRIPTOR)
BOMB = inference_pb2.GenerateRequest(
    chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage()] * 1_900_000)
)  # 3.8 MB that take a hundred once they are parsed


def key_of(tenant: str) -> NewKey:
    bits = random.Random(tenant).getrandbits
    return new_key(bits, tenant_id=tenant, scopes=["generate"], name="", now_unix_s=1.0)


class Router:
    """What is behind the gate."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.keys = {tenant: key_of(tenant) for tenant in ("acme", "other")}
        self.going_on = asyncio.Event()
        self.slow = Places(20, kept=4, few=2)
        self.bytes_per_s = 1 << 30
        self.own: OwnBounds | None = None

    def service(self) -> Service:
        records = {key.record.key_id: key.record for key in self.keys.values()}
        callers = Callers(records.get, FakeClock())
        bounds = Bounds(self.places, self.slow)
        gate = Gate(
            callers,
            bounds,
            tenant_of=tenant_of,
            max_message_bytes=MAX_REQUEST_BYTES,
            pace=bytes_pace(self.bytes_per_s),
            own=self.own,
        )
        return Service(
            DESCRIPTOR,
            {"Generate": self.generate, "ListModels": self.list_models, "GiveFeedback": self.list_models},
            gate=gate,
        )

    async def generate(self, request: Any, call: Any) -> AsyncIterator[Any]:
        yield inference_pb2.GenerateResponse(frame=len(request.text))
        await self.going_on.wait()

    async def list_models(self, request: Any, call: Any) -> Any:
        return inference_pb2.ListModelsResponse(base_model="base")

    def credentials(self, tenant: str) -> dict[str, str]:
        return bearer(self.keys[tenant].key)


@asynccontextmanager
async def served(
    capacity: int = 1_000, kept: int = 100, own: OwnBounds | None = None
) -> AsyncIterator[tuple[Router, Channel]]:
    router = Router(Places(capacity, kept=kept, few=2))
    router.own = own
    server = await GrpcTransport().serve("127.0.0.1:0", [router.service()])
    channel = GrpcTransport().connect(server.address)
    try:
        yield router, channel
        assert router.places.num_held == 0
    finally:
        router.going_on.set()
        await channel.close()
        await server.stop(0)


def ask(router: Router, channel: Channel, tenant: str, text: str = "") -> Stream:
    request = inference_pb2.GenerateRequest(text=text)
    return channel.stream(METHODS["Generate"], request, metadata=router.credentials(tenant))


async def code_of(channel: Channel, request: Any, metadata: dict[str, str]) -> tuple[Code, str]:
    with pytest.raises(RpcError) as caught:
        await channel.stream(METHODS["Generate"], request, metadata=metadata).read()
    return caught.value.code, caught.value.message


async def test_a_strangers_message_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handling, "parse_request", None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with served() as (_, channel):
        codes = await asyncio.gather(*(code_of(channel, BOMB, {}) for _ in range(32)))
        assert {code for code, _ in codes} == {Code.UNAUTHENTICATED}
        with pytest.raises(RpcError) as caught:
            await channel.call(METHODS["ListModels"], inference_pb2.ListModelsRequest())
        assert caught.value.code is Code.UNAUTHENTICATED
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 400, "client and server together: 32 messages of 3.8 MB are here several times"


async def test_a_key_that_ends_while_its_call_waits_to_enter_lets_nobody_in() -> None:
    key, clock, revision = key_of("acme"), FakeClock(), 1
    record = replace(key.record, expires_unix_s=clock.now_unix_s() + 10)
    records = {record.key_id: record}
    callers = Callers(records.get, clock, keys_revision=lambda: revision)
    gate = Gate(callers, Bounds(), tenant_of=tenant_of, max_message_bytes=100, pace=bytes_pace(1 << 30))

    async def entering() -> Callable[[], Pass]:
        return await gate.before_entering(_Call(bearer(key.key)))  # type: ignore[arg-type]

    enter = await entering()
    records[record.key_id], revision = replace(record, revoked_unix_s=2.0), 2
    with pytest.raises(Unauthenticated, match="this key was revoked"):
        enter()
    # Another key's change ends nothing.
    records[record.key_id], revision = record, 3
    enter = await entering()
    revision = 4
    enter().release()
    enter = await entering()
    clock.advance(10)
    with pytest.raises(Unauthenticated, match="this key expired"):
        enter()
    assert gate.bounds.places.num_held == 0


async def test_another_tenants_name_is_refused_before_the_message_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handling, "parse_request", None)
    async with served() as (router, channel):
        code, _ = await code_of(channel, BOMB, {**router.credentials("acme"), "x-tenant-id": "other"})
        assert code is Code.PERMISSION_DENIED


async def test_a_keys_message_is_as_large_as_a_request_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (router, channel):
        stream = ask(router, channel, "acme", "x" * 1_000_000)
        assert (await stream.read()).frame == 1_000_000
        stream.cancel()
        monkeypatch.setattr(handling, "parse_request", None)
        told = await code_of(channel, BOMB, router.credentials("acme"))
        assert told == (
            Code.INVALID_ARGUMENT,
            f"prompt.chat: has 3800000 bytes; a request has at most {MAX_REQUEST_BYTES} in all",
        )


async def test_a_tenants_calls_leave_places_for_others() -> None:
    async with served(capacity=20, kept=4) as (router, channel):
        held = [ask(router, channel, "acme") for _ in range(8)]
        for stream in held:
            await stream.read()
        code, message = await code_of(channel, inference_pb2.GenerateRequest(), router.credentials("acme"))
        assert (code, message[:25]) == (Code.RESOURCE_EXHAUSTED, "8 calls of tenant acme ar")
        for _ in range(50):  # strangers have no places at all
            assert (await code_of(channel, inference_pb2.GenerateRequest(), {}))[0] is Code.UNAUTHENTICATED
        other = ask(router, channel, "other")
        assert (await other.read()).frame == 0
        for stream in (*held, other):
            stream.cancel()
        await until(lambda: not router.places.num_held)


class _Counting(dict[str, Any]):
    """Records, and how often they were looked up."""

    looked_up = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_up += 1
        return super().get(key, default)


class _Call:
    def __init__(self, metadata: dict[str, str], peer: str = "ipv4:10.0.0.1:80") -> None:
        self.metadata, self.peer = metadata, peer

    def time_remaining(self) -> None:
        return None


async def test_a_key_is_looked_at_once_on_the_way_in() -> None:
    key = key_of("acme")
    inside = replace(key.record, networks=("10.0.0.0/8",))
    records = _Counting({key.record.key_id: inside})
    strangers: list[str] = []
    callers = Callers(records.get, FakeClock(), on_stranger=strangers.append)
    gate = Gate(callers, Bounds(), tenant_of=tenant_of, max_message_bytes=100, pace=bytes_pace(1 << 30))
    enter = await gate.before_entering(_Call(bearer(key.key)))  # type: ignore[arg-type]
    held = enter()
    assert held.owner == "tenant acme"
    held.release()
    assert records.looked_up == 1
    for metadata, peer, refusal in (
        (bearer(key.key), "ipv4:11.0.0.1:80", PermissionDenied),
        ({"authorization": "Bearer nobody"}, "ipv4:10.0.0.1:80", Unauthenticated),
    ):
        enter = await gate.before_entering(_Call(metadata, peer))  # type: ignore[arg-type]
        with pytest.raises(refusal):
            enter()
    assert (records.looked_up, strangers) == (3, ["10.0.0.1"])
    assert gate.bounds.places.num_held == 0


async def test_tenants_enter_in_turn_and_all_strangers_in_one() -> None:
    router = Router(Places(1_000, kept=100))
    gate = router.service().gate
    assert gate is not None
    entered: list[str] = []

    async def enter(name: str, metadata: dict[str, str]) -> None:
        await gate.before_entering(_Call(metadata))
        entered.append(name)

    strangers = [{"authorization": f"Bearer {index}"} for index in range(100)]
    foreign = {**router.credentials("acme"), "x-tenant-id": "other"}
    came = [("nobody", metadata) for metadata in strangers] + [("acme", router.credentials("acme"))] * 100
    came += [("foreign", foreign), ("other", router.credentials("other"))]
    await asyncio.gather(*(enter(name, metadata) for name, metadata in came))
    assert entered.index("other") <= 4, entered
    assert entered.index("foreign") > 100, "a key that names another tenant has none"


async def test_a_call_that_sends_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handling, "REQUEST_TIMEOUT_S", 0.05)
    async with served() as (router, channel):
        silent = channel._channel.stream_stream(METHODS["Generate"].path)  # type: ignore[attr-defined]
        call = silent(metadata=tuple(router.credentials("acme").items()))
        assert (await call.code()).value[0] == int(Code.DEADLINE_EXCEEDED)


async def test_a_service_may_have_places_of_its_own() -> None:
    own = Places(20, kept=4, few=2)
    async with served(own=OwnBounds(own)) as (router, channel):
        held = [ask(router, channel, "acme") for _ in range(8)]
        for stream in held:
            await stream.read()
        code, message = await code_of(channel, inference_pb2.GenerateRequest(), router.credentials("acme"))
        assert (code, "8 calls of tenant acme" in message) == (Code.RESOURCE_EXHAUSTED, True)
        assert (router.places.num_held, own.num_held) == (8, 8), "who is refused has no place among all calls either"
        other = ask(router, channel, "other")
        await other.read()
        for stream in (*held, other):
            stream.cancel()
        await until(lambda: not own.num_held)


async def test_calls_of_such_a_service_come_at_their_tenants_pace() -> None:
    """64 loops of refused uploads took a router's whole core."""
    own = OwnBounds(Places(200, kept=4), Pace(20.0, "too many"))
    async with served(own=own) as (router, channel):

        async def seconds(tenant: str, count: int) -> float:
            began = asyncio.get_running_loop().time()
            asked = inference_pb2.ListModelsRequest()
            calls = [
                channel.call(METHODS["ListModels"], asked, metadata=router.credentials(tenant)) for _ in range(count)
            ]
            await asyncio.gather(*calls)
            return asyncio.get_running_loop().time() - began

        fast, other = await asyncio.gather(seconds("acme", 60), seconds("other", 1))
        assert fast > 1.5, "20 are saved, and of 40 more 20 come in a second"
        assert other < fast / 2


async def test_calls_whose_message_does_not_come_leave_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have most of a message in memory."""
    monkeypatch.setattr(handling, "SLOW_S", 0.05)
    async with served() as (router, channel):
        silent = channel._channel.stream_stream(METHODS["Generate"].path)  # type: ignore[attr-defined]
        calls = [silent(metadata=tuple(router.credentials("acme").items())) for _ in range(30)]
        await until(lambda: router.slow.num_held == 8, within_s=5)
        refused = [call for call in calls if call.done()]
        await until(lambda: sum(call.done() for call in calls) == 22, within_s=5)
        assert {(await call.code()).value[0] for call in refused} <= {int(Code.RESOURCE_EXHAUSTED)}
        other = silent(metadata=tuple(router.credentials("other").items()))
        await until(lambda: router.slow.num_held == 9, within_s=5)
        await other.write(inference_pb2.GenerateRequest(text="x").SerializeToString())
        assert inference_pb2.GenerateResponse.FromString(await other.read()).frame == 1
        assert router.slow.num_held == 8
        for call in (*calls, other):
            call.cancel()
        await until(lambda: not router.places.num_held)
        assert router.slow.num_held == 0


async def test_a_crowd_of_small_messages_is_refused_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage()] * 500_000)
    )
    async with served() as (router, channel):
        monkeypatch.setattr(handling, "parse_request", None)
        code, message = await code_of(channel, crowd, router.credentials("acme"))
        assert code is Code.INVALID_ARGUMENT
        assert message.startswith("prompt.chat: has too many parts")
