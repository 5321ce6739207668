"""Whether constraints can be kept, asked beside the event loop. Remembers of each tenant's last ones that they can."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from manylora_shared.constraints.constraint import Constraint
from manylora_shared.errors import FieldViolation
from manylora_shared.process.deep_threads import DeepThreads

NUM_THREADS = 2
MAX_SECONDS = 2.0
_KNOWN_TENANTS = 1024
_KNOWN_OF_A_TENANT = 256


class ConstraintCheck:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._executor = DeepThreads(max_workers=NUM_THREADS, thread_name_prefix="constraints")
        self._known: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()

    def is_known(self, tenant: str, constraint: Constraint) -> bool:
        return constraint.digest in self._known.get(tenant, ())

    async def violation(self, tenant: str, constraint: Constraint) -> FieldViolation | None:
        """What is wrong; a schema that takes long is, too. At most NUM_THREADS at a time get a thread of their own."""
        from manylora_shared.constraints.grammar import refusal  # here: routers that never see a constraint do without

        checking = asyncio.get_running_loop().run_in_executor(self._executor, refusal, constraint)
        done, _ = await asyncio.wait([checking], timeout=MAX_SECONDS)
        if not done:
            return FieldViolation(constraint.field, f"takes longer than {MAX_SECONDS:g} s to compile")
        if (found := checking.result()) is None:
            self._remember(tenant, constraint.digest)
        return found

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _remember(self, tenant: str, digest: bytes) -> None:
        known = self._known.pop(tenant, OrderedDict())
        self._known[tenant] = known
        known[digest] = None
        if len(known) > _KNOWN_OF_A_TENANT:
            known.popitem(last=False)
        if len(self._known) > _KNOWN_TENANTS:
            self._known.popitem(last=False)
