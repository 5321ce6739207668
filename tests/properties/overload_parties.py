"""Callers of every behaviour before the model of overload (bench/): drawn at random from a grammar, or given."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

from manylora_scheduler.core.events import Enqueued, SendGrant, SendRefusal, Settled, Withdrawn
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_shared.errors import Code
from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_shared.tenancy.overload import OverloadView
from manylora_shared.tenancy.policy import DEFAULT_WEIGHTS

from bench.overload_model import Model
from bench.overload_scenario import Scenario
from bench.overload_worker import Call

INTERACTIVE, STANDARD, BATCH = QosClass.INTERACTIVE, QosClass.STANDARD, QosClass.BATCH
PATIENCE_S = 600.0
VICTIM = "victim"
STEP_S = 0.02


@dataclass(frozen=True)
class Party:
    """One tenant's callers: `streams` that each ask again, or groups that come at a steady rate. A pair is a range, of
    which each request draws."""

    name: str
    qos_class: QosClass
    prompt_tokens: int | tuple[int, int]
    output_tokens: int | tuple[int, int]
    streams: int = 0
    per_s: float = 0.0
    group: int = 1
    """Requests of a steady rate that come at once."""
    retry_s: float = 4.0
    """How long a stream waits after a refusal."""
    backs_off: float = 1.0
    """By what the next wait is longer, up to a minute."""
    heeds_hints: bool = False
    """A stream waits at least as long as the refusal says."""
    pause_s: float = 0.0
    """How long it waits after an answer."""
    sequences: int = 1
    classes: tuple[QosClass, ...] = ()
    """Of which each request draws; none: `qos_class`."""
    priorities: int = 0
    deadline_s: float = PATIENCE_S
    cancels_after_s: float = math.inf
    begins_s: float = 0.0
    active_s: float = math.inf
    """So long it asks, and then as long it does not."""


class Parties(Model):
    """The model of bench/ with callers of these kinds in place of its own."""

    def __init__(self, scenario: Scenario, parties: list[Party]) -> None:
        super().__init__(scenario)
        self.parties = {party.name: party for party in parties}
        self.asked: Counter[str] = Counter()
        self.denied: Counter[str] = Counter()
        self.lapsed: Counter[str] = Counter()
        self.capped: Counter[str] = Counter()
        self.most_level = 0
        """The cluster's."""
        self._whose: dict[RequestId, Stream] = {}
        for party in parties:
            for _ in range(party.streams):
                self._ask_at(party.begins_s, Stream(party))
            if party.per_s:
                self._steady_at(party.begins_s + self.rng.random() * party.group / party.per_s, party)

    def _steady_at(self, moment: float, party: Party) -> None:
        def come() -> None:
            for _ in range(party.group):
                self._ask(Stream(party))
            self._steady_at(self.now + party.group / party.per_s, party)

        self.at(moment, come)

    def _ask_at(self, moment: float, stream: Stream) -> None:
        self.at(moment, lambda: self._ask(stream))

    def _ask(self, stream: Stream) -> None:
        party = stream.party
        active_s = self.now - party.begins_s
        if math.isfinite(party.active_s) and active_s // party.active_s % 2:
            if party.streams:
                self._ask_at(party.begins_s + (active_s // party.active_s + 1) * party.active_s + 0.01, stream)
            return
        flow = FlowKey(TenantId(party.name), self.rng.choice(party.classes or (party.qos_class,)))
        request_id = RequestId(f"{self.rng.getrandbits(64):016x}")
        self.asked[party.name] += 1
        ends_by = self.now + party.deadline_s
        tokens = self._drawn(party.output_tokens) * party.sequences
        request = QueuedRequest(
            request_id=request_id,
            router_id=self.router,
            flow=flow,
            prompt_tokens=self._drawn(party.prompt_tokens),
            max_new_tokens=tokens,
            priority=self.rng.randint(-party.priorities, party.priorities),
            deadline=ends_by,
            sequences=party.sequences,
        )
        self._whose[request_id] = stream
        if not self.view.admits(*flow, request_id):
            if not self.refused:
                self.at(self.now + 0.1, self._tell_refused)
            self.refused[flow] = self.refused.get(flow, 0) + 1
            self._deny(stream, 1.0)
            return
        self.calls[request_id] = Call(request, tokens, self.now, ends_by)
        if math.isfinite(party.cancels_after_s):
            self.at(self.now + self.rng.uniform(0.25, 1.0) * party.cancels_after_s, lambda: self._cancel(request_id))
        self.apply(Enqueued(1, request))

    def _drawn(self, tokens: int | tuple[int, int]) -> int:
        return tokens if isinstance(tokens, int) else self.rng.randint(*tokens)

    def _cancel(self, request_id: RequestId) -> None:
        call = self.calls.get(request_id)
        if call is None:
            return
        call.ends_by = min(call.ends_by, self.now)  # the worker drops it with its next step
        if call.worker is None:
            del self.calls[request_id]
            self.apply(Withdrawn(1, request_id))
            self.apply(Settled(self.router, request_id, 0))
            self._ended_of(self._whose[request_id])

    def _deny(self, stream: Stream, hint_s: float) -> None:
        party = stream.party
        self.denied[party.name] += 1
        if party.streams:
            wait_s = max(stream.retry_s, hint_s if party.heeds_hints else 0.0)
            stream.retry_s = min(60.0, stream.retry_s * party.backs_off)
            self._ask_at(self.now + wait_s, stream)

    def _take(self, command: object) -> None:
        if isinstance(command, SendGrant):
            self.capped[self._whose[command.request.request_id].party.name] += command.max_output_tokens is not None
        super()._take(command)  # type: ignore[arg-type]
        if isinstance(command, SendRefusal):
            stream = self._whose[command.request.request_id]
            if command.code is Code.RESOURCE_EXHAUSTED:
                assert command.retry_after_s is not None
                self._deny(stream, command.retry_after_s)
            else:
                self.lapsed[stream.party.name] += 1
                self._ended_of(stream)

    def _hear(self, view: OverloadView) -> None:
        super()._hear(view)
        self.most_level = max(self.most_level, view.level)

    def _was_refused(self, flow: FlowKey, hint_s: float) -> None:
        pass

    def _end(self, call: Call) -> None:
        stream = self._whose[call.request.request_id]
        self.lapsed[stream.party.name] += call.made_tokens < call.output_tokens
        super()._end(call)
        self._ended_of(stream)

    def _ended_of(self, stream: Stream) -> None:
        party = stream.party
        stream.retry_s = party.retry_s
        if party.streams:
            self._ask_at(self.now + max(party.pause_s, 1e-3), stream)


@dataclass(eq=False)
class Stream:
    party: Party
    retry_s: float = 0.0

    def __post_init__(self) -> None:
        self.retry_s = self.party.retry_s


def played(
    parties: list[Party],
    *,
    until_s: float = 60.0,
    workers: int = 1,
    slots: int = 64,
    seed: int = 1,
    overload: bool = True,
) -> Parties:
    scenario = Scenario(
        load=0.0,
        base_load=0.0,
        overload=overload,
        workers=workers,
        slots=slots,
        parked=slots,
        until_s=until_s,
        ends_s=until_s,
        begins_s=0.0,
        measured_from_s=0.0,
        step_s=STEP_S,
        seed=seed,
    )
    model = Parties(scenario, parties)
    model.run()
    return model


# ---- the grammar


def _log(rng: random.Random, least: float, most: float) -> float:
    return math.exp(rng.uniform(math.log(least), math.log(most)))


def _sometimes(rng: random.Random, least: float, most: float, otherwise: float) -> float:
    return _log(rng, least, most) if rng.random() < 0.3 else otherwise


def _tokens(rng: random.Random, least: int, most: int) -> tuple[int, int]:
    few, many = sorted(round(_log(rng, least, most)) for _ in range(2))
    return (few, many) if rng.random() < 0.5 else (many, many)


def random_attacker(rng: random.Random, name: str, cost_per_s: float) -> Party:
    """`cost_per_s`: what the cluster can do."""
    classes = tuple(rng.sample(list(QosClass), rng.choice((1, 1, 2, 3))))
    prompts, outputs = _tokens(rng, 1, 4000), _tokens(rng, 1, 8000)
    sequences = rng.choice((1, 1, 1, 2, 8))
    cost = PROMPT_TOKEN_COST * sum(prompts) / 2 + OUTPUT_TOKEN_COST * sequences * sum(outputs) / 2
    streams, per_s, group = 0, 0.0, 1
    match rng.choice(("streams", "streams", "steady", "groups")):
        case "streams":
            streams = round(_log(rng, 1, 250))
        case "steady":
            per_s = min(100.0, _log(rng, 0.5, 8.0) * cost_per_s / cost)
        case "groups":
            group = round(_log(rng, 2, 300))
            per_s = min(100.0, _log(rng, 0.5, 8.0) * cost_per_s / cost, 2.0 * group)
    least_s = streams / 200  # between two requests of a stream: the model takes so many a second
    return Party(
        name,
        classes[0],
        prompts,
        outputs,
        streams=streams,
        per_s=per_s,
        group=group,
        retry_s=max(least_s, _log(rng, 0.1, 20.0)),
        backs_off=rng.choice((1.0, 1.0, 2.0)),
        heeds_hints=rng.random() < 0.3,
        pause_s=max(least_s, _sometimes(rng, 0.02, 10.0, 0.02)),
        sequences=sequences,
        classes=classes,
        priorities=rng.choice((0, 100)),
        deadline_s=_sometimes(rng, 0.1, 60.0, PATIENCE_S),
        cancels_after_s=_sometimes(rng, 0.04, 10.0, math.inf),
        begins_s=rng.choice((0.0, rng.uniform(0.0, 30.0))),
        active_s=_sometimes(rng, 1.0, 20.0, math.inf),
    )


def random_cast(seed: int, requests: int = 1000, until_s: float = 60.0) -> tuple[list[Party], int, int]:
    """Attackers, and a victim that asks for at most half of its part by weight; workers; and slots of each."""
    rng = random.Random(f"cast {seed}")
    workers, slots = rng.choice((1, 2)), rng.choice((16, 32, 64))
    cost_per_s = OUTPUT_TOKEN_COST * workers * slots / STEP_S  # all slots decode: with prompts there is more
    attackers = [random_attacker(rng, f"attacker{i}", cost_per_s) for i in range(rng.choice((1, 1, 2, 3)))]
    weights = sum(sum(DEFAULT_WEIGHTS[qos_class] for qos_class in party.classes) for party in attackers)
    qos_class = rng.choice(list(QosClass))
    part = DEFAULT_WEIGHTS[qos_class] / (DEFAULT_WEIGHTS[qos_class] + weights)
    per_s = 1.02 * requests / until_s
    most = max(3.0, rng.uniform(0.1, 0.5) * part * cost_per_s / per_s)
    output_tokens = max(1, round(rng.uniform(0.2, 0.9) * most / OUTPUT_TOKEN_COST))
    prompt_tokens = max(1, round(most - OUTPUT_TOKEN_COST * output_tokens))
    victim = Party(
        VICTIM, qos_class, prompt_tokens, output_tokens, per_s=per_s, group=rng.choice((1, 1, 2)), priorities=0
    )
    return [*attackers, victim], workers, slots


def play_random(seed: int, requests: int = 1000, until_s: float = 60.0) -> Parties:
    parties, workers, slots = random_cast(seed, requests, until_s)
    return played(parties, until_s=until_s, workers=workers, slots=slots, seed=seed)


def victim_waits_s(model: Parties) -> list[float]:
    """To the first token; of those that it has not got, so far."""
    flow = FlowKey(TenantId(VICTIM), model.parties[VICTIM].qos_class)
    pending = [model.now - c.came_at for c in model.calls.values() if c.request.flow == flow and not c.made_tokens]
    return sorted([*model.result.ttft_flows.get(flow, []), *pending])
