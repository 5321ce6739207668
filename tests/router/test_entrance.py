"""A handler is asked only by whom the rules let in, and hears who it is."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from manylora.v1 import admin_pb2
from manylora_router.links import acts
from manylora_router.links.acts import Acts
from manylora_router.links.entrance import Entrance, KnownCall
from manylora_shared.audit.entries import Entry
from manylora_shared.audit.log import NotAudited
from manylora_shared.errors import NotFound, Overloaded, PermissionDenied
from manylora_shared.ids import TenantId
from manylora_shared.tenancy.identity import Principal
from manylora_shared.tenancy.roles import Role
from manylora_sim.clock import FakeClock

ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


@dataclass
class Call:
    metadata: Mapping[str, str] = field(default_factory=lambda: {"authorization": "Bearer x"})
    peer: str = "ipv4:10.0.0.1:80"

    def time_remaining(self) -> float | None:
        return 3.0


class Callers:
    def __init__(self, role: Role) -> None:
        self.principal = Principal("k", TenantId("acme"), (), role=role)
        self.asked: list[tuple[str, str]] = []

    def peer_of(self, call: Call) -> str:
        return call.peer

    def known(self, authorization: str, peer: str) -> Principal:
        self.asked.append((authorization, peer))
        return self.principal


class Log:
    def __init__(self, *, is_broken: bool = False) -> None:
        self.entries: list[Entry] = []
        self.is_broken = is_broken

    async def write(self, entry: Entry) -> None:
        if self.is_broken:
            raise NotAudited("the disk is full")
        self.note(entry)

    def note(self, entry: Entry) -> None:
        self.entries.append(entry)

    @property
    def told(self) -> list[tuple[str, str, str]]:
        return [(e.outcome, e.target, e.detail) for e in self.entries]


def entrance(callers: Callers, log: Log) -> Entrance:
    return Entrance(callers, Acts(log, FakeClock()), random.Random(1).getrandbits)  # type: ignore[arg-type]


async def test_who_is_let_in() -> None:
    heard: list[KnownCall] = []

    async def list_keys(request: Any, call: KnownCall) -> Any:
        heard.append(call)
        return admin_pb2.ListKeysResponse()

    def read(request: Any, call: KnownCall) -> AsyncIterator[Any]:
        heard.append(call)
        return SimpleNamespace()  # type: ignore[return-value]

    for role, is_let_in in ((Role.TENANT_ADMIN, True), (Role.GENERATE, False)):
        callers = Callers(role)
        log = Log()
        handlers = entrance(callers, log).guarded(ADMIN, {"ListKeys": list_keys, "VerifyAdapters": read})  # type: ignore[arg-type]
        heard.clear()
        if is_let_in:
            await handlers["ListKeys"](None, Call())
            handlers["VerifyAdapters"](None, Call())
            assert [call.principal for call in heard] == [callers.principal] * 2
            assert (heard[0].peer, heard[0].time_remaining()) == ("ipv4:10.0.0.1:80", 3.0)
            assert heard[0].metadata == {"authorization": "Bearer x", "x-manylora-caller": "10.0.0.1"}
        else:
            with pytest.raises(PermissionDenied):
                await handlers["ListKeys"](None, Call())
            with pytest.raises(PermissionDenied):
                handlers["VerifyAdapters"](None, Call())
            assert heard == []
        assert callers.asked == [("Bearer x", "ipv4:10.0.0.1:80")] * 2
        assert [e.outcome for e in log.entries] == ([] if is_let_in else ["denied", "denied"])


def put_samples(log: Log, effects: list[str], failure: BaseException | None = None) -> Any:
    async def handler(request: Any, call: KnownCall) -> Any:
        await call.will("samples acme/s", None, b"new")
        if failure is not None:
            raise failure
        effects.append("put")
        return admin_pb2.PutSamplesResponse()

    return entrance(Callers(Role.TENANT_ADMIN), log).guarded(ADMIN, {"PutSamples": handler})["PutSamples"]


async def test_an_act_is_told_before_it_is_done_and_then_how_it_ended() -> None:
    log, effects = Log(), list[str]()
    call = Call({"authorization": "Bearer x", "x-request-id": "r1"})
    await put_samples(log, effects)(None, call)
    with pytest.raises(NotFound):
        await put_samples(log, effects, NotFound("gone"))(None, call)
    with pytest.raises(PermissionDenied):
        await put_samples(log, effects, PermissionDenied("not yours"))(admin_pb2.PutSamplesRequest(tenant_id="b"), call)
    with pytest.raises(KeyError):
        await put_samples(log, effects, KeyError("x"))(None, call)
    target = "samples acme/s"
    assert log.told == [
        ("intent", target, ""),
        ("done", target, ""),
        ("intent", target, ""),
        ("failed", target, "NOT_FOUND: gone"),
        ("intent", target, ""),
        ("denied", "tenant b", ""),
        ("intent", target, ""),
        ("failed", target, "KeyError: it may have taken effect"),
    ]
    first = log.entries[0]
    assert (first.who, first.may, first.tenant, first.peer) == ("k", "admin", "acme", "10.0.0.1")
    assert (first.action, first.request) == ("AdminService/PutSamples", "r1")
    assert first.after == hashlib.sha256(b"new").hexdigest()
    assert first.before == ""


async def test_what_cannot_be_told_is_not_done() -> None:
    effects: list[str] = []
    log = Log(is_broken=True)
    with pytest.raises(NotAudited):
        await put_samples(log, effects)(None, Call())
    assert effects == []
    assert log.told == []


async def test_a_stream_that_hands_weights_out_is_told_and_closed() -> None:
    log, closed = Log(), list[str]()

    async def read(request: Any, call: KnownCall) -> AsyncIterator[Any]:
        try:
            await call.will("weights of adapter acme/a@1")
            for _ in range(3):
                yield admin_pb2.ReadAdapterResponse()
        finally:
            closed.append("closed")

    guarded = entrance(Callers(Role.TENANT_ADMIN), log).guarded(ADMIN, {"ReadAdapter": read})["ReadAdapter"]
    assert len([each async for each in guarded(None, Call())]) == 3
    stream = guarded(None, Call())
    await anext(stream)
    await stream.aclose()
    assert closed == ["closed", "closed"]
    assert [e.outcome for e in log.entries] == ["intent", "done", "intent", "failed"]


async def test_a_request_id_is_a_short_text_or_is_made() -> None:
    log, effects = Log(), list[str]()
    handler = put_samples(log, effects)
    for given in ("", "x" * 65, "a\nb", "ä"):
        await handler(None, Call({"authorization": "Bearer x", "x-request-id": given}))
    assert all(re.fullmatch("[0-9a-f]{32}", entry.request) for entry in log.entries)
    assert len({entry.request for entry in log.entries}) == 4


async def test_a_tenants_acts_have_a_rate() -> None:
    log, effects = Log(), list[str]()
    handler = put_samples(log, effects)
    ends = await asyncio.gather(*(handler(None, Call()) for _ in range(acts.ACTS_BURST + 20)), return_exceptions=True)
    refused = [each for each in ends if isinstance(each, Overloaded)]
    assert refused
    assert all(each.retry_after_s is not None for each in refused)
    assert acts.ACTS_BURST <= len(effects) == len(ends) - len(refused)
