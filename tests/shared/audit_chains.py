"""Chains of the audit log as tests make them, without files."""

from __future__ import annotations

import random
import string

from manylora_shared.audit.entries import BEGAN, GENESIS, Entry, Signer, hash_of
from manylora_shared.audit.verify import Segment
from manylora_shared.coordination.records import AuditHeadRecord

SIGNER = Signer(bytes(range(32)))
OTHER = Signer(bytes(32))
ACTIONS = ("AdminService/ApplyTenant", "AdminService/CreateKey", "AdminService/PutSamples", "GET /metrics")
CHAIN = "c0ffee0000000000"


def entry(rng: random.Random) -> Entry:
    def text(most: int) -> str:
        return "".join(rng.choices(string.printable + 'äß€𝄞"\\', k=rng.randrange(most)))

    return Entry(
        at_unix_s=round(rng.uniform(0, 2e9), 3),
        action=rng.choice(ACTIONS),
        outcome=rng.choice(("intent", "done", "failed", "denied", "told")),
        service="router-0",
        who=text(16),
        tenant=text(8),
        request=f"{rng.getrandbits(64):x}",
        target=text(40),
        detail=text(40),
    )


def chain(
    rng: random.Random, num_entries: int, *, num_segments: int = 1, signer: Signer = SIGNER, name: str = CHAIN
) -> tuple[list[Segment], AuditHeadRecord]:
    began = Entry(at_unix_s=1.0, action=BEGAN, outcome="told", detail=signer.public_key)
    lines: list[bytes] = []
    last = GENESIS
    for seq, each in enumerate([began, *(entry(rng) for _ in range(num_entries - 1))], start=1):
        lines.append(signer.line(name, seq, last, each))
        last = hash_of(lines[-1])
    cuts = sorted(rng.sample(range(1, num_entries), num_segments - 1)) if num_segments > 1 else []
    parts = [b"".join(lines[a:b]) for a, b in zip([0, *cuts], [*cuts, num_entries], strict=True)]
    segments = [Segment(name, number, data) for number, data in enumerate(parts, start=1)]
    return segments, signer.head(name, num_entries, last, "router-0", 9.0)
