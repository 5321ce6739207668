"""All names of spans and attributes; docs/OPERATIONS.md says what each means."""

from __future__ import annotations

from collections.abc import Mapping

AttributeValue = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]


class SpanName:
    REQUEST = "manylora.request"
    ADMISSION = "manylora.admission"
    QUEUE_WAIT = "manylora.queue_wait"
    STREAM = "manylora.stream"
    STREAM_WRITE = "manylora.stream_write"
    QUEUE = "manylora.queue"
    PLACEMENT = "manylora.placement"
    EXECUTE = "manylora.execute"
    ADAPTER_LOAD = "manylora.adapter_load"
    BATCH_BUILD = "manylora.batch_build"
    PREFILL = "manylora.prefill"
    DECODE = "manylora.decode"
    DECODE_QUANTUM = "manylora.decode_quantum"


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
    REASON = "manylora.reason"
    POOL = "manylora.pool"
    TIER = "manylora.tier"
    ENGINE = "manylora.engine"
    MODEL = "gen_ai.request.model"
    FINISH_REASON = "manylora.finish_reason"
    MAX_LORA = "manylora.max_lora"
    RUNNING_ADAPTERS = "manylora.running_adapters"
    WAITING_ADAPTERS = "manylora.waiting_adapters"
    BLOCK_SIZE = "manylora.block_size"
    NUM_BLOCKS = "manylora.num_blocks"
    BATCH_ROWS = "manylora.batch.rows"
    WRITES = "manylora.writes"
    WRITE_MS = "manylora.write_ms"
    SLOWEST_WRITE_MS = "manylora.slowest_write_ms"
    ERROR_TYPE = "error.type"
    # OpenTelemetry's semantic conventions for generative AI (status: development)
    GENAI_OPERATION = "gen_ai.operation.name"
    GENAI_PROVIDER = "gen_ai.provider.name"
    GENAI_MAX_TOKENS = "gen_ai.request.max_tokens"
    GENAI_TEMPERATURE = "gen_ai.request.temperature"
    GENAI_TOP_P = "gen_ai.request.top_p"
    GENAI_TOP_K = "gen_ai.request.top_k"
    GENAI_CHOICES = "gen_ai.request.choice.count"
    GENAI_SEED = "gen_ai.request.seed"
    GENAI_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
    GENAI_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
    GENAI_RESPONSE_ID = "gen_ai.response.id"
    GENAI_RESPONSE_MODEL = "gen_ai.response.model"
    GENAI_FINISH_REASONS = "gen_ai.response.finish_reasons"
    GENAI_FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
    GENAI_OUTPUT_TYPE = "gen_ai.output.type"
    GENAI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
    GENAI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    GENAI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"


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
