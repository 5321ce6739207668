"""An adapter's first step, before it is registered: what a request would meet is found here, and told of the adapter.

The trial is a request of its tenant like any other: one load in the tenant's share of the adapters' memory, one prompt
of less than a block, one token; it waits for the tenant's turn and is charged to it.
"""

from __future__ import annotations

import asyncio

from manylora_shared.errors import FieldViolation, ServiceUnavailable
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_shared.stores.adapter_files import WEIGHTS_NAME

from manylora_worker.hosting.output_stream import EndKind, StreamEnd
from manylora_worker.hosting.runtime import Runtime
from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.weights.adapter_check import AdapterValidator

TRIAL_S = 120.0


class AdapterTrial:
    def __init__(self, runtime: Runtime, validator: AdapterValidator) -> None:
        self._runtime = runtime
        self._validator = validator
        self._trials = 0

    async def problem(self, path: str, tenant_id: TenantId, uid: AdapterUid) -> FieldViolation | None:
        """path: as AdapterValidator's, of files that it found good.

        Raises:
            InvalidRequest, QuotaExceeded: the tenant could never run it.
            Overloaded, ServiceUnavailable: this worker cannot try it now.
        """
        with self._validator.lends(path, uid):
            end = await self._run(tenant_id, uid)
        if end.kind is EndKind.COMPLETED:
            return None
        if end.kind is not EndKind.ADAPTER_FAILED:
            raise ServiceUnavailable(f"the adapter's first step failed: {end.message}")
        has_run = end.request_end is not None and end.request_end.times.first_step_s is not None
        message = end.message
        if has_run:
            largest = await self._validator.largest_update(path, uid)
            message += f", after a probe of {self._num_tokens}: values overflow; the largest update is {largest}"
        return FieldViolation(WEIGHTS_NAME, message)

    @property
    def _num_tokens(self) -> int:
        # With the one that is drawn they fill a block at most.
        model, block_size = self._runtime.model, self._runtime.view.stats.block_size
        return max(1, min(block_size - 1, model.max_context_tokens - 1, model.vocab_size))

    async def _run(self, tenant_id: TenantId, uid: AdapterUid) -> StreamEnd:
        self._trials += 1
        apart = max(1, self._runtime.model.vocab_size // self._num_tokens)
        request = EngineRequest(
            request_id=RequestId(f"trial-{self._trials}-{uid[:16]}"),
            tenant_id=tenant_id,
            qos_class=QosClass.STANDARD,
            adapter_uid=uid,
            prompt_token_ids=tuple(apart * index for index in range(self._num_tokens)),
            max_tokens=1,
            sampling=Sampling(temperature=0.0),
            is_trial=True,
        )
        stream = self._runtime.submit(request)
        try:
            async with asyncio.timeout(TRIAL_S):
                while (end := (await stream.read()).end) is None:
                    pass
                return end
        except TimeoutError:
            raise ServiceUnavailable(f"the adapter's first step did not come in {TRIAL_S:g} s") from None
        finally:
            if not stream.is_ended:
                self._runtime.abort(request.request_id)
