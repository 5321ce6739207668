"""All names of spans, attributes and metrics; docs/OPERATIONS.md says what each means."""

from __future__ import annotations

from collections.abc import Mapping

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue]


class SpanName:
    REQUEST = "manylora.request"
    ADMISSION = "manylora.admission"
    QUEUE_WAIT = "manylora.queue_wait"
    STREAM = "manylora.stream"
    QUEUE = "manylora.queue"
    PLACEMENT = "manylora.placement"
    EXECUTE = "manylora.execute"
    ADAPTER_LOAD = "manylora.adapter_load"
    PREFILL = "manylora.prefill"
    DECODE = "manylora.decode"


class MetricName:
    """The SLO_ ones alone name tenants, of a bounded number."""

    OVERLOAD_LEVEL = "manylora.overload.level"
    OVERLOAD_TENANTS = "manylora.overload.tenants"
    OVERLOAD_GIVEN_UP = "manylora.overload.given_up"
    NOISY_NEIGHBOURS = "manylora.noisy_neighbours"
    PREEMPTIONS = "manylora.preemptions"
    KV_EVICTIONS = "manylora.kv.evictions"
    KV_SWAPS = "manylora.kv.swaps"
    KV_SWAPPED_BYTES = "manylora.kv.swapped_bytes"
    KV_HOST_BYTES = "manylora.kv.host_bytes"
    ADAPTER_EVICTIONS = "manylora.adapter_evictions"
    UNMET_PINS = "manylora.unmet_pins"
    ETCD_USED_PART = "manylora.etcd.used_part"

    # what is left of the error budget is 1 - bad / ((1 - target) * (good + bad))
    SLO_REQUESTS = "manylora.slo.requests"
    SLO_AVAILABILITY_TARGET = "manylora.slo.availability_target"
    SLO_FIRST_TOKENS = "manylora.slo.first_tokens"
    SLO_TTFT = "manylora.slo.ttft_ms"
    SLO_TPOT = "manylora.slo.tpot_ms"
    CIRCUITS = "manylora.circuits"
    QUARANTINED_PROMPTS = "manylora.quarantined_prompts"


class Attribute:
    """TENANT_ID, QOS_CLASS and ADAPTER_ID are on every span."""

    TENANT_ID = "manylora.tenant.id"
    QOS_CLASS = "manylora.class"
    ADAPTER_ID = "manylora.adapter.id"  # in its tenant's namespace; empty: the base model
    ADAPTER_VERSION = "manylora.adapter.version"  # its content uid
    ADAPTER_NUMBER = "manylora.adapter.number"  # which of its name's versions
    ADAPTER_RESIDENT = "manylora.adapter.resident"
    REQUEST_ID = "manylora.request.id"
    SCHEDULER_ID = "manylora.scheduler.id"
    SCHEDULER_EPOCH = "manylora.scheduler.epoch"
    WORKER_ID = "manylora.worker.id"
    ATTEMPT = "manylora.attempt"
    OUTCOME = "manylora.outcome"
    PROMPT_TOKENS = "manylora.prompt_tokens"
    OUTPUT_TOKENS = "manylora.output_tokens"
    MAX_TOKENS = "manylora.max_tokens"
    QUEUE_DEPTH = "manylora.queue.depth"
    TTFT_MS = "manylora.ttft_ms"
    STAGE = "manylora.stage"
    KIND = "manylora.kind"
    VERDICT = "manylora.verdict"
    DIRECTION = "manylora.direction"
    KV_SWAPPED = "manylora.kv.swapped"
    KV_EVICTED = "manylora.kv.evicted"
    ERROR_TYPE = "error.type"


def request_attributes(
    *,
    tenant: str,
    qos_class: str,
    adapter: str,
    adapter_version: str = "",
    adapter_number: int = 0,
    request_id: str = "",
) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        Attribute.TENANT_ID: tenant,
        Attribute.QOS_CLASS: qos_class,
        Attribute.ADAPTER_ID: adapter,
    }
    if adapter_version:
        found[Attribute.ADAPTER_VERSION] = adapter_version
    if adapter_number:
        found[Attribute.ADAPTER_NUMBER] = adapter_number
    if request_id:
        found[Attribute.REQUEST_ID] = request_id
    return found
