"""All names of spans, attributes and metrics."""

from __future__ import annotations

from collections.abc import Mapping

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue]


class SpanName:
    """Span names."""

    REQUEST = "manylora.request"
    """Router: from the call to its terminal frame; the root of the trace, or a child of the caller's span."""
    ADMISSION = "manylora.admission"
    """Router: tenant, adapter and fields checked, prompt tokenized."""
    QUEUE_WAIT = "manylora.queue_wait"
    """Router: from enqueue to grant."""
    STREAM = "manylora.stream"
    """Router: from the call of the worker to its last frame."""
    QUEUE = "manylora.queue"
    """Scheduler: the request's time in its flow's queue."""
    PLACEMENT = "manylora.placement"
    """Scheduler: the choice of the worker."""
    EXECUTE = "manylora.execute"
    """Worker: the whole of its part."""
    ADAPTER_LOAD = "manylora.adapter_load"
    """Worker: the wait for the adapter's weights to be on the device."""
    PREFILL = "manylora.prefill"
    DECODE = "manylora.decode"


class MetricName:
    """Metric names. None has a tenant among its attributes (who it was stands in the status) but the SLO_ ones: these
    have TENANT_ID and QOS_CLASS of flows whose policy has a target, of a bounded number."""

    OVERLOAD_LEVEL = "manylora.overload.level"
    """Scheduler, gauge: what the cluster gives up, 0 (nothing) to 128."""
    OVERLOAD_TENANTS = "manylora.overload.tenants"
    """Scheduler, gauge: tenants that give up requests of their own, beyond that level."""
    OVERLOAD_GIVEN_UP = "manylora.overload.given_up"
    """Scheduler, counter by QOS_CLASS and STAGE: requests that were refused, shed or capped."""
    NOISY_NEIGHBOURS = "manylora.noisy_neighbours"
    """Scheduler, gauge by KIND: tenants that a detector reports."""
    PREEMPTIONS = "manylora.preemptions"
    """Worker, counter: sequences that gave up their slot to others at a unit's end."""
    KV_EVICTIONS = "manylora.kv.evictions"
    """Worker, counter: sequences that lost their blocks and are computed again."""
    KV_SWAPS = "manylora.kv.swaps"
    """Worker, counter by DIRECTION: sequences whose KV went to host memory, and came back."""
    KV_SWAPPED_BYTES = "manylora.kv.swapped_bytes"
    """Worker, counter by DIRECTION: what was copied for that."""
    KV_HOST_BYTES = "manylora.kv.host_bytes"
    """Worker, gauge: KV in host memory."""
    ADAPTER_EVICTIONS = "manylora.adapter_evictions"
    """Scheduler, counter by KIND: adapters that left a worker's device for want of room, for their own tenant's (own)
    or for another's (displaced)."""
    UNMET_PINS = "manylora.unmet_pins"
    """Scheduler, gauge: pins that are not on a connected worker's device, summed over the workers."""

    SLO_REQUESTS = "manylora.slo.requests"
    """Router, counter by VERDICT (good, bad): requests that count for availability. Over any time, what is left of the
    error budget is 1 - bad / ((1 - target) * (good + bad))."""
    SLO_AVAILABILITY_TARGET = "manylora.slo.availability_target"
    """Router, gauge: classes.*.slo.availability, as it stood when the last request ended."""
    SLO_FIRST_TOKENS = "manylora.slo.first_tokens"
    """Router, counter by VERDICT (in_time, late): first tokens within the ttft_p95_ms of their time, and after it."""
    SLO_TTFT = "manylora.slo.ttft_ms"
    """Router, histogram: times to the first token."""
    SLO_TPOT = "manylora.slo.tpot_ms"
    """Router, histogram: times per output token, the mean of each completed request."""
    CIRCUITS = "manylora.circuits"
    """Router, gauge by KIND (open, half_open): circuits of tenants and adapters that are not closed."""
    QUARANTINED_PROMPTS = "manylora.quarantined_prompts"
    """Router, gauge."""


class Attribute:
    """Attribute names. TENANT_ID, QOS_CLASS and ADAPTER_ID are on every span."""

    TENANT_ID = "manylora.tenant.id"
    QOS_CLASS = "manylora.class"
    ADAPTER_ID = "manylora.adapter.id"
    """The adapter's name in its tenant's namespace; empty: the base model."""
    ADAPTER_VERSION = "manylora.adapter.version"
    """The adapter's content uid."""
    ADAPTER_RESIDENT = "manylora.adapter.resident"
    """Whether the chosen worker had the adapter's weights already."""
    REQUEST_ID = "manylora.request.id"
    ROUTER_ID = "manylora.router.id"
    SCHEDULER_ID = "manylora.scheduler.id"
    SCHEDULER_EPOCH = "manylora.scheduler.epoch"
    WORKER_ID = "manylora.worker.id"
    ATTEMPT = "manylora.attempt"
    """Which attempt to run the request this is, from 1."""
    OUTCOME = "manylora.outcome"
    PROMPT_TOKENS = "manylora.prompt_tokens"
    OUTPUT_TOKENS = "manylora.output_tokens"
    MAX_TOKENS = "manylora.max_tokens"
    QUEUE_DEPTH = "manylora.queue.depth"
    TTFT_MS = "manylora.ttft_ms"
    STAGE = "manylora.stage"
    """Of OVERLOAD_GIVEN_UP: router, admission, queue or output."""
    KIND = "manylora.kind"
    """Of NOISY_NEIGHBOURS: the detector. Of ADAPTER_EVICTIONS: for whom. Of CIRCUITS: open or half_open."""
    VERDICT = "manylora.verdict"
    """Of SLO_REQUESTS: good or bad. Of SLO_FIRST_TOKENS: in_time or late."""
    DIRECTION = "manylora.direction"
    """Of KV_SWAPS and KV_SWAPPED_BYTES: out or in."""
    KV_SWAPPED = "manylora.kv.swapped"
    """How often the KV of one of the request's sequences went to host memory."""
    KV_EVICTED = "manylora.kv.evicted"
    """How often one of them lost its blocks and was computed again."""
    ERROR_TYPE = "error.type"
    """The gRPC status name of a span that failed."""


def request_attributes(
    *, tenant: str, qos_class: str, adapter: str, adapter_version: str = "", request_id: str = ""
) -> dict[str, AttributeValue]:
    """What every span of a request carries; empty optional values are left out."""
    found: dict[str, AttributeValue] = {
        Attribute.TENANT_ID: tenant,
        Attribute.QOS_CLASS: qos_class,
        Attribute.ADAPTER_ID: adapter,
    }
    if adapter_version:
        found[Attribute.ADAPTER_VERSION] = adapter_version
    if request_id:
        found[Attribute.REQUEST_ID] = request_id
    return found
