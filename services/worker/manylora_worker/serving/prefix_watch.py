"""The public prefixes in the coordination store, as far as they are this model's: handed to the engine.

Owns a mirror of their records. While the store is away, what was last known stays public. What changes in one moment is
told together.
"""

from __future__ import annotations

import asyncio
import logging

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store
from manylora_shared.coordination.records import PublicPrefixRecord
from manylora_shared.coordination.session import Mirror
from manylora_shared.telemetry.logs import fields

from manylora_worker.hosting.runtime import Runtime

_LOG = logging.getLogger(__name__)


class PrefixWatch:
    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._runtime = runtime
        self._records = Mirror(
            store,
            keys.PUBLIC_PREFIXES,
            parse=lambda kv: PublicPrefixRecord.from_json(kv.value),
            on_change=self._changed,
        )
        self._is_ready = False
        self._due: asyncio.Handle | None = None

    async def start(self) -> None:
        """Returns when the engine was told of all that stand in the store, through any outage; it computes them
        then."""
        self._records.start()
        await self._records.ready()
        self._is_ready = True
        if self._records.values:
            self._tell()

    async def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
        await self._records.close()

    def _changed(self, name: str, record: PublicPrefixRecord | None) -> None:
        if self._is_ready and self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._due = None
        model = self._runtime.model
        prefixes: dict[str, tuple[int, ...]] = {}
        for name, record in self._records.values.items():
            if record.model_digest != model.digest:
                _LOG.warning("a public prefix is of another model", extra=fields(prefix=name))
            elif max(record.token_ids) >= model.vocab_size:
                _LOG.error("a public prefix has tokens that the model has not", extra=fields(prefix=name))
            else:
                prefixes[name] = record.token_ids
        self._runtime.set_public_prefixes(prefixes)
