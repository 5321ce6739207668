"""A plan as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

_WIDTH = 110
_SHOWN_TENANTS = 10


def shown(document: Mapping[str, Any]) -> str:
    return "".join(f"{line}\n" for line in _lines(document))


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    traffic, arena, expected = (document[name] for name in ("traffic", "arena", "expected"))
    workers, cost, gpus = document["workers"], document["cost"], document["gpus_a_worker"]
    each = f"a {document['gpu']}" if gpus == 1 else f"{gpus} {document['gpu']}"
    yield f"{workers} worker{'s' * (workers != 1)}, each {each} with {document['model']}"
    if gpus > 1:
        yield "            memory is that of one of a worker's GPUs"
    if not document["keeps_objectives"]:
        yield "  TOO FEW   with the spare traffic they do not keep the objectives"
    if document["played"]["is_small_sample"]:
        played = document["played"]
        workers_there = f"{played['workers']} worker{'s' * (played['workers'] != 1)}"
        yield (
            f"  FEW       only {played['requests']} requests were played, on {workers_there}: "
            "of a longer time the plan would be surer"
        )
    yield f"  steps     {document['curve']['origin']}"
    yield (
        f"  traffic   {traffic['requests_per_s']:g} requests/s of {traffic['tenants']} tenants and "
        f"{traffic['adapters']} adapters: {traffic['prompt_tokens_per_s']:,.0f} tokens/s in, "
        f"{traffic['output_tokens_per_s']:,.0f} out"
    )
    yield f"  flags     {document['worker_flags']}"
    yield f"  weights   {document['weights_gib']:g} GiB of the GPU's memory"
    yield (
        f"  arena     {arena['gib']:g} GiB: KV {arena['kv_mb']:,} MiB ({arena['kv_tokens']:,} tokens), adapters "
        f"{arena['device_adapter_mb']:,} MiB ({arena['adapters_resident']} of {traffic['adapters']} at a time)"
    )
    if arena["state_tokens"]:
        yield f"            a sequence's state takes {arena['state_tokens']:,} tokens of the KV beside its own"
    yield (
        f"  expected  first token p50 {expected['ttft_p50_ms']:.0f} ms, p95 {expected['ttft_p95_ms']:.0f} ms; between "
        f"tokens {expected['tpot_p50_ms']:.1f} / {expected['tpot_p95_ms']:.1f} ms; "
        f"{expected['tokens_per_s']:,.0f} tokens/s"
    )
    yield (
        f"            a mean step of {expected['mean_batch']:.0f} rows takes {expected['mean_step_ms']:.1f} ms; busy "
        f"{expected['busy_share']:.0%} of the time; {expected['loads_a_minute']:.0f} loads and "
        f"{expected['evictions_a_minute']:.0f} evictions of adapters a minute"
    )
    if cost["gpu_hour"] is not None:
        yield (
            f"  cost      {cost['hour']:.2f} an hour; {cost['million_output_tokens']:.3f} a million tokens out, "
            f"{cost['million_tokens']:.3f} a million in and out"
        )
    for rule in document["rules"]:
        words = f"{'ACT ' if rule['act'] else ''}{rule['says']}"
        yield from textwrap.wrap(words, _WIDTH, initial_indent=f"  {rule['rule']:<11} ", subsequent_indent=" " * 14)
    tenants = list(document["tenants"].items())
    if len(tenants) > 1:
        yield f"  tenant{'first token p50 / p95':>48}{'between tokens p50 / p95':>28}"
        for name, times in tenants[:_SHOWN_TENANTS]:
            first = f"{times['ttft_p50_ms']:.0f} / {times['ttft_p95_ms']:.0f} ms"
            between = f"{times['tpot_p50_ms']:.1f} / {times['tpot_p95_ms']:.1f} ms"
            yield f"  {name[:30]:<30}{first:>24}{between:>28}"
