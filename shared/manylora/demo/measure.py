"""The demo's run, on the public client alone: four tenants stream at once, and every answer is checked.

Own round: each tenant sends its held-out inputs with its own adapter. Cross round: the other tenants send the same
inputs with theirs, and must not have the first tenant's skill. Everything reported is counted or timed on the client's
side.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from manylora.client import Client, Delta, RequestFailed, Result, Sampling
from manylora.demo import adapter_folder, skills
from manylora.demo.skills import SKILLS, Skill

INPUTS_PER_TENANT = 40
STREAMS_PER_TENANT = 6
INPUT_SEED = 1
MIN_EXACT_MATCH = 0.95
MAX_CROSS_EXACT_MATCH = 0.05
MAX_REPORTED_FAILURES = 10


@dataclass(frozen=True)
class DemoTenant:
    tenant: str
    skill: Skill

    @property
    def policy_yaml(self) -> str:
        return f'tenant_id: "{self.tenant}"\nclasses:\n  interactive: {{weight: 4}}\n  standard: {{weight: 2}}\n'


TENANTS: tuple[DemoTenant, ...] = tuple(
    DemoTenant(name, skill) for name, skill in zip(("harbor", "lumen", "quarry", "tern"), SKILLS, strict=True)
)


class View(Protocol):
    """Streams are numbered; `sender` is the tenant in whose name one runs."""

    def title(self, text: str) -> None: ...

    def begin(self, stream: int, sender: DemoTenant, text: str) -> None: ...

    def append(self, stream: int, text: str) -> None: ...

    def end(self, stream: int, *, expected: bool) -> None:
        """expected: the answer is what it should be (in the cross round: is not the other tenant's)."""


@dataclass(frozen=True)
class Task:
    """`text` is `owner`'s held-out input, `sender` sends it with its own adapter."""

    owner: DemoTenant
    sender: DemoTenant
    text: str


@dataclass(frozen=True)
class Answer:
    """Times are the client's monotonic clock, seconds. `result` is None where the request failed."""

    task: Task
    result: Result | None
    error: str
    sent_s: float
    first_token_s: float
    ended_s: float

    @property
    def matches_owner(self) -> bool:
        return self.result is not None and self.result.text == self.task.owner.skill.answer(self.task.text)


@dataclass(frozen=True)
class TenantReport:
    tenant: str
    adapter: str
    requests: int
    exact_match: float
    cross_exact_match: float
    ttft_ms_p50: float
    tokens_per_s: float


@dataclass(frozen=True)
class Report:
    ok: bool
    tenants: tuple[TenantReport, ...]
    requests: int
    concurrent_streams: int
    requests_by_worker: Mapping[str, int]
    # requests that failed, or that another version than the tenant's adapter answered: the first few
    failures: tuple[str, ...]


async def set_up(client: Client) -> dict[str, str]:
    """Returns each tenant's adapter version."""
    for each in TENANTS:
        await client.tenants.apply(each.policy_yaml)
    added = await asyncio.gather(
        *(client.adapters.add(t.tenant, t.skill.adapter, adapter_folder(t.skill.adapter)) for t in TENANTS)
    )
    return {adapter.tenant_id: adapter.version for adapter in added}


async def run(client: Client, view: View, versions: Mapping[str, str]) -> Report:
    """versions: what `set_up` gave."""
    own_tasks = {
        t.tenant: [Task(t, t, text) for text in skills.held_out_inputs(INPUT_SEED + i, INPUTS_PER_TENANT)]
        for i, t in enumerate(TENANTS)
    }
    cross_tasks: dict[str, list[Task]] = {t.tenant: [] for t in TENANTS}
    for tasks in own_tasks.values():
        for i, task in enumerate(tasks):
            others = [t for t in TENANTS if t is not task.owner]
            sender = others[i % len(others)]
            cross_tasks[sender.tenant].append(Task(task.owner, sender, task.text))
    view.title("each tenant, its own adapter")
    own = await _round(client, view, own_tasks)
    view.title("the same inputs, sent by the other tenants with theirs")
    cross = await _round(client, view, cross_tasks)
    return _report(own, cross, versions)


async def _round(client: Client, view: View, tasks: Mapping[str, Sequence[Task]]) -> list[Answer]:
    """All senders at once, STREAMS_PER_TENANT streams each."""
    answers: list[Answer] = []
    numbers = iter(range(sum(len(each) for each in tasks.values())))

    async def work(queue: Iterator[Task]) -> None:
        for task in queue:
            answers.append(await _ask(client, view, next(numbers), task))

    async with asyncio.TaskGroup() as group:
        for each in tasks.values():
            queue = iter(each)
            for _ in range(STREAMS_PER_TENANT):
                group.create_task(work(queue))
    return answers


async def _ask(client: Client, view: View, number: int, task: Task) -> Answer:
    view.begin(number, task.sender, task.text)
    result, error = None, ""
    sent_s = time.monotonic()
    first_token_s = sent_s
    try:
        async with client.generate(
            skills.prompt(task.text),
            tenant=task.sender.tenant,
            adapter=task.sender.skill.adapter,
            qos_class="interactive",
            max_tokens=skills.MAX_ANSWER_TOKENS,
            sampling=Sampling(temperature=0.0),
        ) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    if first_token_s == sent_s and event.token_ids:
                        first_token_s = time.monotonic()
                    view.append(number, event.text)
            result = stream.result()
    except RequestFailed as failure:
        error = str(failure)
    answer = Answer(task, result, error, sent_s, first_token_s, time.monotonic())
    view.end(number, expected=answer.matches_owner == (task.owner is task.sender))
    return answer


def _report(own: Sequence[Answer], cross: Sequence[Answer], versions: Mapping[str, str]) -> Report:
    tenants = tuple(_tenant_report(t, own, cross) for t in TENANTS)
    failures = [reason for answer in (*own, *cross) if (reason := _failure(answer, versions))]
    workers = [a.result.worker_id for a in (*own, *cross) if a.result is not None]
    ok = not failures and all(
        t.exact_match >= MIN_EXACT_MATCH and t.cross_exact_match < MAX_CROSS_EXACT_MATCH for t in tenants
    )
    return Report(
        ok=ok,
        tenants=tenants,
        requests=len(own) + len(cross),
        concurrent_streams=len(TENANTS) * STREAMS_PER_TENANT,
        requests_by_worker={worker: workers.count(worker) for worker in sorted(set(workers))},
        failures=tuple(failures[:MAX_REPORTED_FAILURES]),
    )


def _tenant_report(tenant: DemoTenant, own: Sequence[Answer], cross: Sequence[Answer]) -> TenantReport:
    mine = [a for a in own if a.task.owner is tenant]
    others = [a for a in cross if a.task.owner is tenant]
    answered = [a for a in mine if a.result is not None]
    tokens = sum(a.result.usage.completion_tokens for a in answered if a.result is not None)
    span_s = max(a.ended_s for a in mine) - min(a.sent_s for a in mine)
    ttfts_ms = [1000 * (a.first_token_s - a.sent_s) for a in answered]
    return TenantReport(
        tenant=tenant.tenant,
        adapter=tenant.skill.adapter,
        requests=len(mine),
        exact_match=round(sum(a.matches_owner for a in mine) / len(mine), 4),
        cross_exact_match=round(sum(a.matches_owner for a in others) / len(others), 4),
        ttft_ms_p50=round(statistics.median(ttfts_ms), 2) if ttfts_ms else 0.0,
        tokens_per_s=round(tokens / span_s, 1),
    )


def _failure(answer: Answer, versions: Mapping[str, str]) -> str:
    sender = answer.task.sender.tenant
    if answer.result is None:
        return f"{sender}: {answer.error}"
    if answer.result.adapter_version != versions[sender]:
        return f"{sender}: answered by version {answer.result.adapter_version!r}, not {versions[sender]!r}"
    return ""


def table(report: Report) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
    columns = ("tenant", "adapter", "requests", "exact match", "by others' adapters", "TTFT p50", "tokens/s")
    rows = [
        (
            t.tenant,
            t.adapter,
            t.requests,
            f"{t.exact_match:.1%}",
            f"{t.cross_exact_match:.1%}",
            f"{t.ttft_ms_p50:.1f} ms",
            f"{t.tokens_per_s:.0f}",
        )
        for t in report.tenants
    ]
    return columns, rows
