"""What the commands on an adapter's versions do: the name's line, shown after each change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from manylora.cli.output import Target, print_json, print_table, write
from manylora.client import AdapterLine
from manylora.client.aio import Adapters


async def change(
    target: Target, name: str, make: Callable[[Adapters], Awaitable[AdapterLine]], *, as_json: bool
) -> None:
    async with target.client() as client:
        line = await make(client.adapters)
    if as_json:
        print_json(line)
        return
    rollout = line.rollout
    share = f", version {rollout.to} gets {rollout.percent} % by {rollout.sticky}" if rollout is not None else ""
    steps = " > ".join(map(str, rollout.auto.steps)) if rollout is not None and rollout.auto is not None else ""
    by_itself = f", and by itself {steps} > 100 %" if steps else ""
    write(f"{name}: version {line.in_force} is in force{share}{by_itself}\n")


async def history(target: Target, tenant: str, name: str, *, as_json: bool) -> None:
    async with target.client() as client:
        line = await client.adapters.history(tenant, name)
    if as_json:
        print_json(line)
        return
    rows = [
        (
            each.number,
            _state(line, each.number, each.retired_unix_s, each.state),
            each.version[:12],
            each.max_lora_rank,
            f"{each.size_bytes / 1e6:.2f} MB",
            _time(each.created_unix_s),
        )
        for each in line.versions
    ]
    print_table(("version", "state", "digest", "rank", "size", "created"), rows, empty="there are no versions")
    for event in line.events:
        before = f", before it {event.before}" if event.before else ""
        percent = f" to {event.percent} %" if event.change == "rollout" else ""
        why = f": {event.why}" if event.why else ""
        write(f"{_time(event.at_unix_s)} {event.change} {event.number}{percent}{before}{why}\n")
    progress = line.rollout.progress if line.rollout is not None else None
    if progress is not None:
        write(f"evidence against the version {progress.evidence:.3g} of {progress.limit:g}; in this step ")
        write(f"{progress.canary_requests} of its requests and {progress.stable_requests} others\n")
        for each in progress.findings:
            shares = (
                f"{each.canary_share:.1%} of {each.canary_outcomes}, {each.stable_share:.1%} of {each.stable_outcomes}"
            )
            write(f"  {each.name}: {shares} (evidence {each.evidence:.3g})\n")


def _state(line: AdapterLine, number: int, retired_unix_s: float, verdict: str) -> str:
    if number == line.in_force and not verdict:
        return "in force"
    if line.rollout is not None and number == line.rollout.to:
        return f"rollout {line.rollout.percent} %"
    return "retired" if retired_unix_s else verdict or "by @ alone"


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
