"""Kept prompts and answers: whose are kept, how they stand in the store, and when they go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from manylora.v1 import data_pb2
from manylora_router.keeping import texts
from manylora_router.keeping.retention import RetentionDesk
from manylora_router.keeping.texts import DAY_S, TextKeeper
from manylora_router.request.tapes import KeptText
from manylora_shared.coordination import keys
from manylora_shared.errors import (
    InternalError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    ServiceUnavailable,
    Unready,
)
from manylora_shared.ids import TenantId
from manylora_shared.tenancy.identity import Principal
from manylora_shared.tenancy.policy import TenantPolicy, TenantSecurity
from manylora_sim.adapter_files import MemoryAdapterFiles
from manylora_sim.documents import MemoryDocuments
from manylora_sim.store import MemoryStoreServer

ACME, BIRCH = TenantId("acme"), TenantId("birch")
TEXT = KeptText(ACME, "r1", 1_000_000.0, "ann", "support", "I am ann@example.com", ("Hello Ann",), True)


@dataclass
class Bench:
    documents: MemoryDocuments
    policies: dict[TenantId, TenantPolicy]
    now: float = 1_000_010.0
    drawn: int = 0

    def keeper(self, max_bytes: int = 1 << 20) -> TextKeeper:
        def drawn(bits: int) -> int:
            self.drawn += 1
            return self.drawn

        def policy_of(tenant: TenantId) -> TenantPolicy | None:
            if tenant == "broken":
                raise InternalError("the stored policy cannot be read")
            return self.policies.get(tenant)

        return TextKeeper(
            self.documents, policy_of=policy_of, now_unix_s=lambda: self.now, getrandbits=drawn, max_bytes=max_bytes
        )

    async def kept(self, keeper: TextKeeper, tenant: TenantId = ACME, user: str = "") -> list[KeptText]:
        return [text async for text in keeper.export(tenant, user)]


@pytest.fixture
def bench() -> Bench:
    bench: list[Bench] = []
    documents = MemoryDocuments(MemoryAdapterFiles(), now_unix_s=lambda: bench[0].now)
    security = TenantSecurity(data_retention_days=7, scrub_names=("Ann",))
    bench.append(Bench(documents, {t: TenantPolicy(t, security=security) for t in (ACME, BIRCH)}))
    return bench[0]


async def test_what_is_kept_is_scrubbed_and_a_tenants_own(bench: Bench) -> None:
    keeper = bench.keeper()
    keeper.take(TEXT)
    keeper.take(replace(TEXT, tenant=BIRCH, request_id="r2"))
    await keeper.write_all()
    assert all(b"ann@example" not in data and b"Hello Ann" not in data for data, _ in bench.documents.kept.values())
    assert await bench.kept(keeper) == [replace(TEXT, prompt="I am [email]", answers=("Hello [name]",))]
    assert [text.request_id for text in await bench.kept(bench.keeper(), BIRCH)] == ["r2"]
    assert await bench.kept(keeper, ACME, "bob") == []


async def test_it_goes_in_time_or_when_the_policy_says_so(bench: Bench) -> None:
    keeper = bench.keeper()
    keeper.take(TEXT)
    await keeper.write_all()
    bench.now = TEXT.at_unix_s + 7 * DAY_S - 1
    await keeper.remove_old()
    assert len(await bench.kept(keeper)) == 1
    bench.now += 1
    await keeper.remove_old()
    assert bench.documents.kept == {}
    keeper.take(replace(TEXT, at_unix_s=bench.now))
    await keeper.write_all()
    await bench.documents.put("documents/broken/texts/1-00", b"")
    bench.policies[ACME] = TenantPolicy(ACME)
    await keeper.remove_old()
    assert list(bench.documents.kept) == ["documents/broken/texts/1-00"]  # nobody knows for how long
    keeper.take(TEXT)
    await keeper.write_all()
    assert await bench.kept(keeper) == []


async def test_an_end_users_texts_are_erased_wherever_they_are(bench: Bench) -> None:
    keeper, other = bench.keeper(), bench.keeper()
    keeper.take(TEXT)
    keeper.take(replace(TEXT, request_id="r2", user="bob"))
    await keeper.write_all()
    keeper.take(replace(TEXT, request_id="r3"))  # not written yet
    other.take(replace(TEXT, request_id="r4"))  # nor at another router
    assert await keeper.erase(ACME, "ann") == 1
    await other.write_all()
    other.take(replace(TEXT, request_id="r5", at_unix_s=bench.now + 1))  # asked afterwards
    assert [text.request_id for text in await bench.kept(other)] == ["r2", "r5"]
    assert await keeper.erase(ACME, "nobody") == 0
    # a segment that another router wrote without having heard of it
    segment = texts._lines([TEXT], ())
    await bench.documents.put("documents/acme/texts/1000000-ff", segment)
    await keeper.remove_old()
    assert [text.request_id for text in await bench.kept(other)] == ["r2", "r5"]


async def test_a_tenant_has_bounds_here_and_in_the_store(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_PENDING_CHARS", 2000)
    keeper = bench.keeper(max_bytes=1500)
    for number in range(5):
        keeper.take(replace(TEXT, request_id=str(number)))
    keeper.take(replace(TEXT, tenant=BIRCH))
    assert keeper.dropped == 2
    assert len(await bench.kept(keeper)) == 3
    for number in range(100):
        keeper.take(replace(TEXT, request_id=f"more {number}", prompt="x" * 300))
        await keeper.write_all()
    assert sum(len(data) for path, (data, _) in bench.documents.kept.items() if "/acme/" in path) <= 1500
    assert keeper.dropped > 90
    assert len(await bench.kept(keeper, BIRCH)) == 1


async def test_a_store_that_does_not_answer_costs_texts_and_no_more(bench: Bench) -> None:
    keeper = bench.keeper()
    put = bench.documents.put

    async def fails(path: str, data: bytes) -> None:
        raise ServiceUnavailable("the bucket cannot be used now") if "acme" in path else NotFound("tenant_id: gone")

    bench.documents.put = fails  # type: ignore[method-assign]
    for tenant in (ACME, BIRCH, TenantId("broken")):
        keeper.take(replace(TEXT, tenant=tenant))
    await keeper.write_all()
    assert keeper.dropped == 2
    bench.documents.put = put  # type: ignore[method-assign]
    keeper.take(TEXT)
    assert len(await bench.kept(keeper)) == 1


async def test_it_writes_by_itself(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "WRITE_S", 0.0)
    keeper = bench.keeper()
    keeper.take(TEXT)
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(10):
        while not bench.documents.kept:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    running.cancel()


async def test_who_may_export_and_erase(bench: Bench) -> None:
    store = MemoryStoreServer().client()
    await store.put(keys.tenant("acme"), b"tenant_id: acme\n")
    keeper = bench.keeper()
    keeper.take(TEXT)
    desk = RetentionDesk(store, keeper)
    acts: list[str] = []

    async def will(target: str, before: bytes | None = None, after: bytes | None = None) -> None:
        acts.append(target)

    own: Any = SimpleNamespace(principal=Principal("k", ACME, ()), will=will)

    async def exported(**values: str) -> AsyncIterator[str]:
        async for each in desk.export(data_pb2.ExportTextsRequest(**values), own):
            yield each.prompt

    assert [each async for each in exported()] == ["I am [email]"]
    with pytest.raises(PermissionDenied):
        await anext(exported(tenant_id="birch"))
    with pytest.raises(InvalidRequest, match="user"):
        await desk.erase(data_pb2.EraseTextsRequest(), own)
    assert (await desk.erase(data_pb2.EraseTextsRequest(user="ann"), own)).erased == 1
    assert acts == ["kept texts of tenant acme", "kept texts of an end user of tenant acme"]
    nobodys: Any = SimpleNamespace(principal=Principal("k", None, ()), will=will)
    with pytest.raises(InvalidRequest, match="tenant_id"):
        await desk.erase(data_pb2.EraseTextsRequest(user="ann"), nobodys)
    with pytest.raises(NotFound):
        await desk.erase(data_pb2.EraseTextsRequest(user="ann", tenant_id="none"), nobodys)
    with pytest.raises(Unready, match="no --encryption"):
        await RetentionDesk(store, None).erase(data_pb2.EraseTextsRequest(user="ann"), own)
