"""The Python client over two routers that are stopped or killed, beside schedulers and workers that are, too.

Every call completes with the right tokens and text, each once. Where routers are stopped in order, it is charged to the
token what an undisturbed one is. A key's work is done and charged once, whichever routers its callers ask; who comes
when the router is gone that had the answer is told so.
Of three seeds one stops routers, one kills them, and one leaves them alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from manylora.client import Client, RequestFailed, Result, RetryPolicy, Sampling
from manylora.client.streams.progress import Progress
from manylora.client.streams.stream import GenerateStream
from manylora_router.front.kept_answers import KeptAnswers
from manylora_router.links.answer_owners import AnswerOwners
from manylora_router.request.choices import Choices
from manylora_router.request.token_lease import TokenLease
from manylora_sim.loop import run

from tests.sim.cluster import TENANTS, Cluster, address_of
from tests.sim.traffic import CLIENT, Call, Traffic

CALLS = 18
FAULTS = 5
SPREAD_S = 4.0
END_S = 60.0
SETTLED_S = 12.0
"""Longer than a worker's word is waited for."""
KINDS = range(3)
READ_IN_PART = 180
"""Of two callers of a key one has a part of an answer that the other has whole, as their router stops."""
STOPS = (READ_IN_PART, *range(0, 90, len(KINDS)))
"""Seeds that stop routers in order: there charges are known to the token. Some planted bugs show in one of six."""
RETRY = RetryPolicy(max_attempts=60, budget_attempts=1e6, resume_s=1e6)
"""Time is virtual here, and the client's clock is not: it never gives up."""


@dataclass
class Asked:
    """A call with its caller's view: under one key two callers ask, and both are to get the one answer."""

    call: Call
    key: str
    ids: dict[str, None] = field(default_factory=dict)
    """The request's ids at the routers that it was at, in order."""
    result: Result | None = None
    is_lost: bool = False
    """Its key's router is gone with the answer."""

    def check(self) -> None:
        call, result = self.call, self.result
        if self.is_lost:
            return
        assert result is not None, call.describe()
        assert result.outcome == "completed", call.describe()
        for index, choice in enumerate(result.choices):
            right = call.reference(index)
            assert list(choice.token_ids) == right, f"{index}: {call.describe()}"
            assert choice.text == call.reference_text(index), f"{index}: {call.describe()}"
        assert result.usage.completion_tokens == sum(len(choice.token_ids) for choice in result.choices)
        assert result.usage.prompt_tokens == len(call.prompt)

    @property
    def tokens(self) -> int:
        """Of the whole answer, whether or not this caller has it."""
        return sum(len(self.call.reference(choice)) for choice in range(self.call.n))


class Callers:
    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.asked: list[Asked] = []
        self._cluster = cluster
        self._rng = random.Random(f"{seed}/callers")
        self._traffic = Traffic(cluster, seed)
        self._clients = [self._client(order) for order in (("router0", "router1"), ("router1", "router0"))]

    def _client(self, routers: tuple[str, str]) -> Client:
        client = Client(
            ",".join(address_of(name) for name in routers),
            key=self._cluster.key,
            retry=RETRY,
            transport=self._cluster.network.transport(CLIENT),
        )
        client._caller.rng = random.Random(self._rng.getrandbits(64))
        return client

    async def run(self) -> None:
        async with asyncio.timeout(END_S), asyncio.TaskGroup() as group:
            for number in range(CALLS):
                call = self._traffic.long(self._rng.choice(list(TENANTS)), self._rng.choice([1, 1, 2]))
                call.number, key = number, f"key {number}" if number % 3 == 0 else ""
                for client in self._clients if key else [self._rng.choice(self._clients)]:
                    asked = Asked(call, key)
                    self.asked.append(asked)
                    group.create_task(self._ask(client, asked))
                await asyncio.sleep(self._rng.expovariate(CALLS / SPREAD_S))

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def _ask(self, client: Client, asked: Asked) -> None:
        call = asked.call
        sampling = Sampling(seed=call.seed, temperature=0.0) if call.is_greedy else Sampling(seed=call.seed)
        await asyncio.sleep(self._rng.choice([0.0, 0.3, 3.0]) if asked.key else 0.0)
        stream = client.generate(
            call.prompt,
            tenant=call.tenant,
            adapter=call.adapter,
            max_tokens=call.max_tokens,
            n=call.n,
            sampling=sampling,
            idempotency_key=asked.key,
        )
        _note_ids(stream, asked)
        try:
            asked.result = await stream.collect()
        except RequestFailed as e:
            if e.reason != "ANSWER_LOST":
                raise
            asked.is_lost = True


def _note_ids(stream: GenerateStream, asked: Asked) -> None:
    take = stream._progress.take

    def noted(message: Any) -> None:
        if message.HasField("started"):
            asked.ids[message.started.request_id] = None
        take(message)

    stream._progress.take = noted  # type: ignore[method-assign]


async def disturb(cluster: Cluster, rng: random.Random, *, routers: bool, kills: bool) -> None:
    """Routers, schedulers and workers in turn; each is back before the next one goes."""
    kinds = ["router0", "router1", "router0", "router1", "scheduler0"] if routers else ["scheduler0", "scheduler1"]
    names = [rng.choice(kinds) for _ in range(FAULTS)]
    names[rng.randrange(FAULTS)] = "worker0"  # once: whose prompts are there twice are quarantined
    for name in names:
        await asyncio.sleep(rng.uniform(0.3, 1.2))
        process = cluster.processes[name]
        if kills:
            await cluster.kill(process, silently=rng.random() < 0.3)
        else:
            await cluster.stop(process)
        cluster.launch(process)
        await cluster.all_up()


def check_charges(cluster: Cluster, callers: Callers, *, routers: bool, kills: bool) -> None:
    billed = cluster.meter.billed
    assert all(len(bills) <= 1 for bills in billed.values()), "a request is billed once"
    if not kills:
        told = {request_id for asked in callers.asked for request_id in asked.ids}
        untold = {request_id: bills for request_id, bills in billed.items() if request_id not in told and sum(bills)}
        assert not untold, f"billed, and their callers were told nothing and asked anew: {untold}"
    for asked in {id(each.call): each for each in callers.asked}.values():
        ids = dict.fromkeys(i for each in callers.asked if each.call is asked.call for i in each.ids)
        charged = sum(sum(billed.get(request_id, ())) for request_id in ids)
        prompt = len(asked.call.prompt)
        what = f"{charged} are charged for {prompt} + {asked.tokens} over {list(ids)}: {asked.call.describe()}"
        if not routers:
            assert len(ids) == 1, f"its work was done {len(ids)} times: {what}"
        if not kills:
            assert asked.tokens <= charged <= prompt + asked.tokens, what


async def main(seed: int) -> None:
    cluster = Cluster(seed)
    cluster.have_routers_ports = True
    await cluster.start()
    await asyncio.sleep(1.0)
    kind = {"routers": seed % 3 < 2, "kills": seed % 3 == 1}
    callers = Callers(cluster, seed)
    node = cluster.loop.node(CLIENT)
    running = node.start(callers.run())
    await disturb(cluster, random.Random(f"{seed}/disturb"), **kind)
    await running
    for asked in callers.asked:
        asked.check()
    by_key: dict[str, list[Asked]] = {}
    for asked in callers.asked:
        if asked.key:
            by_key.setdefault(asked.key, []).append(asked)
    for both in by_key.values():
        lost = [each for each in both if each.is_lost]
        assert kind["routers"] or not lost
        assert len(lost) < len(both) or kind["kills"], "one of them has the answer that was begun"
        assert len(lost) < len(both) or not any(each.ids for each in both), "who was told of it goes on"
    await asyncio.sleep(SETTLED_S)
    check_charges(cluster, callers, **kind)
    await node.start(callers.close())
    for process in cluster.processes.values():
        await cluster.stop(process)


def play(seed: int) -> None:
    run(main(seed), seed=seed)


@pytest.mark.each_nth_seed(150)
@pytest.mark.parametrize("kind", KINDS, ids=["stops", "kills", "leaves alone"])
def test_nothing_is_lost_doubled_or_charged_twice(sim_seed: int, kind: int) -> None:
    play(sim_seed + kind)


def test_what_one_caller_has_is_not_charged_again_to_the_other() -> None:
    play(READ_IN_PART)


# ---- planted bugs


def _key_is_not_found(original: Any) -> Any:
    def find(self: Any, tenant: Any, request: Any, request_id: str) -> Any:
        found = original(self, tenant, request, request_id)
        return found if found is None or found.request_id == request_id else None

    return find


def _everybody_has_the_key(original: Any) -> Any:
    async def claim(self: Any, tenant: str, digest: str, request_id: str, *, takes_over: bool = False) -> Any:
        return await original(self, tenant, digest, request_id, takes_over=True)

    return claim


def _nobody_knows_that_it_has_begun(original: Any) -> Any:
    async def begin(self: Any, tenant: str, digest: str, request_id: str, revision: int) -> int:
        return revision

    return begin


def _charged_again(original: Any) -> Any:
    def taken_over(self: Any, charged_tokens: int) -> None:
        self.resumed()

    return taken_over


def _nobody_knows_what_was_charged(original: Any) -> Any:
    async def leave(self: Any, *args: Any, **more: Any) -> None:
        pass

    return leave


def _drawn_in_vain_is_charged(original: Any) -> Any:
    return lambda self: None


def _told_nobody_and_charged(original: Any) -> Any:
    return lambda self: None


def _text_again(original: Any) -> Any:
    def go_on(self: Any, delivered: Any, max_tokens: int) -> Any:
        return original(self, [(token_ids, 0) for token_ids, _ in delivered], max_tokens)

    return go_on


def _last_token_is_forgotten(original: Any) -> Any:
    def request(self: Any) -> Any:
        asked = original(self)
        for emitted in asked.resume.emitted:
            del emitted.token_ids[-1:]
        return asked

    return request


@pytest.mark.mutants
@pytest.mark.parametrize(
    ("owner", "attribute", "make"),
    [
        (KeptAnswers, "find", _key_is_not_found),
        (AnswerOwners, "claim", _everybody_has_the_key),
        (AnswerOwners, "begin", _nobody_knows_that_it_has_begun),
        (AnswerOwners, "leave", _nobody_knows_what_was_charged),
        (TokenLease, "taken_over", _charged_again),
        (TokenLease, "hand_over", _drawn_in_vain_is_charged),
        (TokenLease, "forgive", _told_nobody_and_charged),
        (Choices, "go_on", _text_again),
        (Progress, "request", _last_token_is_forgotten),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_planted_bugs_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, attribute: str, make: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))

    def all_seeds() -> None:
        for seed in STOPS:
            play(seed)

    with pytest.raises((AssertionError, TimeoutError, ExceptionGroup)):
        all_seeds()
