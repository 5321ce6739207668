"""The pools' texts: the default pool's is there from the start, each other one is loaded when it is first asked for.

There are as many as this router was told of, and no more. A pool that it was told nothing of takes token ids alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from manylora_shared.errors import Unready
from manylora_shared.ids import DEFAULT_POOL
from manylora_shared.telemetry.logs import fields

from manylora_router.text.service import TextService, TokenIdsOnlyText

_LOG = logging.getLogger(__name__)
Load = Callable[[], TextService]  # blocks for seconds; raises OSError or ValueError


class Texts:
    def __init__(self, default: TextService, loads: Mapping[str, Load] | None = None) -> None:
        """loads: of further pools."""
        self.default = default
        self._loads = dict(loads or {})
        self._known: dict[str, TextService] = {DEFAULT_POOL: default}
        self._loading: dict[str, asyncio.Future[TextService]] = {}

    def known(self, pool: str) -> TextService:
        """One that `of` has given."""
        return self._known[pool]

    async def of(self, pool: str) -> TextService:
        """Who asks while it is loaded waits for that. Raises Unready where it cannot be; the next call tries again."""
        found = self._known.get(pool)
        if found is not None:
            return found
        load = self._loads.get(pool)
        if load is None:
            return self._known.setdefault(pool, TokenIdsOnlyText())
        loading = self._loading.get(pool)
        if loading is None:
            loading = self._loading[pool] = asyncio.ensure_future(asyncio.to_thread(load))
            loading.add_done_callback(lambda done: self._loaded(pool, done))
        try:
            return await asyncio.shield(loading)
        except (OSError, ValueError) as e:
            raise Unready(f"this router cannot read the tokenizer of pool {pool}") from e

    async def close(self) -> None:
        for loading in list(self._loading.values()):
            await asyncio.wait([loading])
        for text in self._known.values():
            await text.close()

    def _loaded(self, pool: str, done: asyncio.Future[TextService]) -> None:
        del self._loading[pool]
        error = done.exception()
        if error is None:
            self._known[pool] = done.result()
        else:
            _LOG.error("a pool's tokenizer cannot be read", extra=fields(pool=pool, error=str(error)))
