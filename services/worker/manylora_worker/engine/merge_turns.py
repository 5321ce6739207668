"""One adapter in the base model's weights, forth and back, a matrix at a time between two steps. EngineCore writes it.

    REST --set--> LOADING (to the device) --> WRITING --> REST, merged --set--> RESTORING --> REST

It begins where no request is left, and until it is over none is added. Rows of a merged adapter are computed as the
base model's. Other adapters do not move meanwhile: what is made of the base model's weights as they come would be
wrong.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_worker.adapters.cache import AdapterCache
from manylora_worker.kinds.api import EngineRequest, MergeRefused, MergingRunner, ModelRunner

HOLDER = RequestId("")  # of the adapter while it is merged: no request has this id
NO_MERGING = "layers that several processes share (--tensor-parallel) are not merged"

Told = Callable[[str], None]  # what went wrong; empty: nothing


class Phase(enum.Enum):
    REST = "rest"
    LOADING = "loading"
    WRITING = "writing"
    RESTORING = "restoring"


class Merging:
    def __init__(self, runner: ModelRunner, adapters: AdapterCache) -> None:
        self._runner = runner if isinstance(runner, MergingRunner) else None
        self._adapters = adapters
        self.merged: AdapterUid | None = None  # for reading: whose weights are in the base model's, all of them
        self.phase = Phase.REST
        self._wanted: tuple[AdapterUid, TenantId] | None = None
        self._is_loaded = False
        self._problem = ""
        self._tell: Told = _nobody

    @property
    def problem(self) -> str:
        """Why this engine merges nothing; empty: it does."""
        return NO_MERGING if self._runner is None else self._runner.merge_problem

    @property
    def is_changing(self) -> bool:
        return self.phase is not Phase.REST

    @property
    def moves_adapters(self) -> bool:
        return self.merged is None and self.phase in (Phase.REST, Phase.LOADING)

    @property
    def is_writing(self) -> bool:
        """There is something to do at once."""
        return self.phase in (Phase.WRITING, Phase.RESTORING)

    def takes(self, request: EngineRequest) -> bool:
        return not self.is_changing and self.merged in (None, request.adapter_uid)

    def set(self, uid: AdapterUid | None, tenant_id: TenantId, tell: Told, now: float) -> None:
        """No request is left. None: back to the base model. `tell` is called once it is over."""
        assert not self.is_changing
        self._wanted, self._tell, self._problem = (None if uid is None else (uid, tenant_id)), tell, ""
        if self.merged == uid:
            self._over()
        elif self.merged is not None:
            self.phase = Phase.RESTORING
        else:
            self._load(now)

    def loaded(self) -> None:
        """The adapter is on the device."""
        self._is_loaded = True

    def load_failed(self, message: str) -> None:
        self._problem = message
        self._over()

    def pump(self, now: float) -> None:
        """Raises what the runner raises where it cannot give the base model back: it then computes nothing right."""
        if self.phase is Phase.LOADING and self._is_loaded and not self._adapters.num_loading:
            self.phase = Phase.WRITING
        if self.phase is Phase.RESTORING:
            self._restore(now)
        elif self.phase is Phase.WRITING:
            self._write(now)

    def _load(self, now: float) -> None:
        assert self._wanted is not None
        if self.problem:
            self.load_failed(self.problem)
            return
        uid, tenant_id = self._wanted
        self.phase, self._is_loaded = Phase.LOADING, False
        if self._adapters.acquire(HOLDER, tenant_id, uid, now):
            self.loaded()

    def _write(self, now: float) -> None:
        assert self._runner is not None
        assert self._wanted is not None
        uid, _ = self._wanted
        try:
            is_written = self._runner.merge_some(uid)
        except Exception as error:  # whatever it is, no memory for what is kept as a rule, the base model comes back
            self._problem = str(error) if isinstance(error, MergeRefused) else f"{type(error).__name__}: {error}"
            self._adapters.release(HOLDER, now)
            self.phase = Phase.RESTORING
            return
        if is_written:
            self._adapters.release(HOLDER, now)
            self.merged = uid
            self._over()

    def _restore(self, now: float) -> None:
        assert self._runner is not None
        if not self._runner.restore_some():
            return
        self.merged, self.phase = None, Phase.REST
        if self._wanted is None or self._problem:
            self._over()
        else:
            self._load(now)

    def _over(self) -> None:
        self.phase = Phase.REST
        tell, self._tell = self._tell, _nobody
        tell(self._problem)


def _nobody(problem: str) -> None: ...
