"""Every metric there is, once: OTLP, `/metrics`, the boards and the alert rules are made of this table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from manylora_shared.telemetry.names import Attribute

Kind = Literal["counter", "gauge", "histogram"]
Service = Literal["router", "scheduler", "worker", "every"]

LABELS: Mapping[str, str] = {
    Attribute.TENANT_ID: "tenant",
    Attribute.QOS_CLASS: "class",
    Attribute.ADAPTER_ID: "adapter",
    Attribute.ADAPTER_NUMBER: "version",
    Attribute.OUTCOME: "outcome",
    Attribute.REASON: "reason",
    Attribute.TIER: "tier",
    Attribute.POOL: "pool",
    Attribute.STAGE: "stage",
    Attribute.KIND: "kind",
    Attribute.VERDICT: "verdict",
    Attribute.DIRECTION: "direction",
    Attribute.GENAI_OPERATION: "operation",
    Attribute.MODEL: "model_name",
    Attribute.ENGINE: "engine",
    Attribute.FINISH_REASON: "finished_reason",
    Attribute.MAX_LORA: "max_lora",
    Attribute.RUNNING_ADAPTERS: "running_lora_adapters",
    Attribute.WAITING_ADAPTERS: "waiting_lora_adapters",
    Attribute.BLOCK_SIZE: "block_size",
    Attribute.NUM_BLOCKS: "num_gpu_blocks",
}
OTHER = "other"  # instead of a name that is not among those that are used most

_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000)
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_STEPS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_TOKENS = (1, 8, 32, 128, 512, 2_048, 8_192, 32_768, 131_072)


@dataclass(frozen=True)
class Metric:
    """
    name: Prometheus's; a counter's series add `_total`.
    labels: keys of LABELS.
    otlp: the name over OTLP; empty: not sent, for a receiver could not forget what is no longer named.
    """

    name: str
    kind: Kind
    service: Service
    help: str
    labels: Sequence[str] = ()
    unit: str = ""  # UCUM's
    buckets: Sequence[float] = ()
    otlp: str = ""

    @property
    def series(self) -> str:
        """What a query names; of a histogram its buckets."""
        return self.name + {"counter": "_total", "gauge": "", "histogram": "_bucket"}[self.kind]


_FLOW = (Attribute.TENANT_ID, Attribute.QOS_CLASS)
_TENANT = (Attribute.TENANT_ID,)
_VERSION = (Attribute.TENANT_ID, Attribute.ADAPTER_ID, Attribute.ADAPTER_NUMBER)
_VLLM = (Attribute.ENGINE, Attribute.MODEL)
_GENAI = (Attribute.GENAI_OPERATION, Attribute.MODEL)


def _from_otlp(
    otlp: str, kind: Kind, service: Service, help: str, labels: Sequence[str] = (), unit: str = "", name: str = ""
) -> Metric:
    buckets = _MS if kind == "histogram" else ()
    return Metric(name or otlp.replace(".", "_"), kind, service, help, labels, unit, buckets, otlp)


def _pool(name: str, help: str, unit: str = "") -> Metric:
    return Metric(
        f"manylora_pool_{name}", "gauge", "scheduler", help, (Attribute.POOL,), unit, (), f"manylora.pool.{name}"
    )


def _genai(name: str, help: str, buckets: Sequence[float]) -> Metric:
    seconds = name.replace(".", "_") + "_seconds"
    return Metric(seconds, "histogram", "router", help, _GENAI, "s", buckets, name)


def _vllm(
    name: str, kind: Kind, help: str, labels: Sequence[str] = (), unit: str = "", buckets: Sequence[float] = ()
) -> Metric:
    return Metric(f"vllm:{name}", kind, "worker", help, (*_VLLM, *labels), unit, buckets)


class Metrics:
    """Tenants and adapters are those that are used most, the others `other`; of SLO_ ones those with a target."""

    # of the router, by tenant and class
    REQUESTS = Metric("inference_requests", "counter", "router", "Requests that ended", _FLOW)
    OUTCOMES = Metric(
        "request_outcomes", "counter", "router", "Requests by how they ended", (*_FLOW, Attribute.OUTCOME)
    )
    REJECTIONS = Metric(
        "request_rejections",
        "counter",
        "router",
        "Requests refused before they were queued",
        (*_FLOW, Attribute.REASON),
    )
    PROMPT_TOKENS = Metric("prompt_tokens", "counter", "router", "Prompt tokens, cached ones included", _FLOW)
    CACHED_TOKENS = Metric("cached_prompt_tokens", "counter", "router", "Prompt tokens found in the cache", _FLOW)
    COMPLETION_TOKENS = Metric("completion_tokens", "counter", "router", "Tokens of answers", _FLOW)
    TTFT = Metric("ttft_seconds", "histogram", "router", "From arrival to the first token", _FLOW, "s", _SECONDS)
    TPOT = Metric(
        "time_per_output_token_seconds",
        "histogram",
        "router",
        "Of a completed answer, for each token after the first",
        _FLOW,
        "s",
        _TOKEN_SECONDS,
    )
    INTER_TOKEN = Metric(
        "inter_token_latency_seconds",
        "histogram",
        "router",
        "Between two frames of a stream, for each token of the later one",
        _FLOW,
        "s",
        _TOKEN_SECONDS,
    )
    E2E = Metric("request_duration_seconds", "histogram", "router", "From arrival to the end", _FLOW, "s", _SECONDS)
    QUEUE_WAIT = Metric("queue_wait_seconds", "histogram", "router", "In the scheduler's queue", _FLOW, "s", _SECONDS)
    RESUMES = Metric("resumes", "counter", "router", "Answers that another worker went on with", _FLOW)
    RESUME_PAUSE = Metric(
        "resume_pause_seconds",
        "histogram",
        "router",
        "From the loss of a stream's worker to the next token",
        _FLOW,
        "s",
        _SECONDS,
    )
    GENAI_DURATION = _genai("gen_ai.server.request.duration", "Duration of a request", _SECONDS)
    GENAI_TTFT = _genai("gen_ai.server.time_to_first_token", "Time to the first token", _SECONDS)
    GENAI_TPOT = _genai("gen_ai.server.time_per_output_token", "Time for each token after the first", _TOKEN_SECONDS)
    # what is left of the error budget is 1 - bad / ((1 - target) * (good + bad))
    SLO_REQUESTS = _from_otlp(
        "manylora.slo.requests", "counter", "router", "Requests, good or bad", (*_FLOW, Attribute.VERDICT)
    )
    SLO_AVAILABILITY_TARGET = _from_otlp(
        "manylora.slo.availability_target", "gauge", "router", "Part of requests that is to be good", _FLOW
    )
    SLO_FIRST_TOKENS = _from_otlp(
        "manylora.slo.first_tokens", "counter", "router", "First tokens, in time or late", (*_FLOW, Attribute.VERDICT)
    )
    SLO_TTFT = _from_otlp("manylora.slo.ttft_ms", "histogram", "router", "Time to the first token", _FLOW, "ms")
    SLO_TPOT = _from_otlp(
        "manylora.slo.tpot_ms", "histogram", "router", "Time for each token after the first", _FLOW, "ms"
    )
    LIVE_REQUESTS = Metric("live_requests", "gauge", "router", "Requests that run now", otlp="manylora.live_requests")
    WORKERS = Metric("workers", "gauge", "router", "Workers that are registered", otlp="manylora.workers")
    HAS_LEADER = Metric(
        "scheduler_reachable", "gauge", "router", "1: this router has a leader", otlp="manylora.scheduler.reachable"
    )
    CIRCUITS = _from_otlp("manylora.circuits", "gauge", "router", "Circuits that refuse", (Attribute.KIND,))
    QUARANTINED_PROMPTS = _from_otlp("manylora.quarantined_prompts", "gauge", "router", "Prompts that are not run")
    LEDGER_DOWN = Metric("ledger_down", "gauge", "router", "1: the ledger's sink takes no rows, and the log keeps them")
    LEDGER_FULL = Metric("ledger_full", "gauge", "router", "1: the ledger's log has no room left")
    LEDGER_BACKLOG = Metric("ledger_backlog_bytes", "gauge", "router", "Of the ledger's log, not sent yet", (), "By")
    LEDGER_LOST = Metric("ledger_lost_rows", "counter", "router", "Rows of requests whose router died")
    CAPS_WITHOUT_EFFECT = Metric(
        "budget_caps_without_effect", "gauge", "router", "Tenants whose quotas.monthly_spend the router cannot hold"
    )
    LEDGER_DROPPED = Metric("ledger_dropped_records", "counter", "router", "For which the ledger's log had no room")

    ROLLOUT_REQUESTS = Metric(
        "rollout_requests",
        "counter",
        "router",
        "Requests of versions in a rollout that completed, or failed by the version's fault",
        (*_VERSION, Attribute.OUTCOME),
    )
    ROLLOUT_TTFT = Metric(
        "rollout_ttft_seconds",
        "histogram",
        "router",
        "To the first token, without the adapter's load, of versions in a rollout",
        _VERSION,
        "s",
        _SECONDS,
    )
    ROLLOUT_TPOT = Metric(
        "rollout_time_per_output_token_seconds",
        "histogram",
        "router",
        "For each token after the first, of versions in a rollout",
        _VERSION,
        "s",
        _TOKEN_SECONDS,
    )
    FEEDBACK = Metric(
        "feedback_score",
        "histogram",
        "router",
        "Callers' scores; of versions in a rollout by version",
        _VERSION,
        buckets=(0, 0.25, 0.5, 0.75, 1),
    )

    CERTIFICATE_EXPIRY = Metric(
        "certificate_expiry_timestamp_seconds",
        "gauge",
        "every",
        "When this process's certificate ends, unix time; where it has one",
        unit="s",
        otlp="manylora.certificate_expiry",
    )

    TASKS = Metric(
        "event_loop_tasks",
        "gauge",
        "every",
        "Tasks of this process's event loop: a few for itself, and some for each request and stream",
        otlp="manylora.event_loop_tasks",
    )

    # of the scheduler; of one that stands by only LEADING, KEPT_OUT_WORKERS and ETCD_USED_PART
    LEADING = Metric("scheduler_leading", "gauge", "scheduler", "1: it leads", otlp="manylora.scheduler.leading")
    OVERLOAD_LEVEL = _from_otlp("manylora.overload.level", "gauge", "scheduler", "Level of the ladder")
    OVERLOAD_TENANTS = _from_otlp(
        "manylora.overload.tenants", "gauge", "scheduler", "Tenants with a level of their own"
    )
    OVERLOAD_GIVEN_UP = _from_otlp(
        "manylora.overload.given_up",
        "counter",
        "scheduler",
        "What was given up",
        (Attribute.QOS_CLASS, Attribute.STAGE),
    )
    NOISY_NEIGHBOURS = _from_otlp("manylora.noisy_neighbours", "gauge", "scheduler", "Noisy tenants", (Attribute.KIND,))
    ADAPTER_EVICTIONS = _from_otlp(
        "manylora.adapter_evictions", "counter", "scheduler", "Adapters that left a device", (Attribute.KIND,)
    )
    UNMET_PINS = _from_otlp("manylora.unmet_pins", "gauge", "scheduler", "Pins whose adapter is not on its device")
    ROLLOUT_DECISIONS = _from_otlp(
        "manylora.rollout.decisions",
        "counter",
        "scheduler",
        "What rollouts that judge themselves decided: step, promote or rollback, and by what",
        (Attribute.KIND, Attribute.REASON),
    )
    CONNECTED_WORKERS = Metric(
        "scheduler_connected_workers",
        "gauge",
        "scheduler",
        "Workers whose stream stands",
        otlp="manylora.scheduler.connected_workers",
    )
    # of each pool, for autoscaling
    POOL_WORKERS = _pool("workers", "Workers that take requests")
    POOL_WORKERS_WANTED = _pool(
        "workers_wanted", "Workers that hold what is predicted at 80 % load each, and what waits now"
    )
    POOL_WANTED = _pool("tokens_wanted_per_second", "Asked for, refused ones included: prompt tokens count half")
    POOL_CAPACITY = _pool("tokens_capacity_per_second", "What the workers could do, by what they do")
    POOL_LOAD = _pool("load_ratio", "Tokens wanted to tokens that there are; above 1 the pool is too small")
    POOL_PREDICTED = _pool("predicted_tokens_per_second", "Wanted in five minutes, by a linear trend")
    POOL_QUEUE_S = _pool("queue_seconds", "How long the oldest interactive or standard request has waited", "s")
    POOL_QUEUED = _pool("queued_requests", "Requests that wait in the queue")
    POOL_KV = _pool("kv_pressure_ratio", "Used part of the KV blocks")
    POOL_ADAPTERS = _pool("adapter_pressure_ratio", "Part of the last 30 s' grants whose adapter had to be loaded")
    KEPT_OUT_WORKERS = Metric(
        "manylora_kept_out_workers",
        "gauge",
        "scheduler",
        "Registered workers that their pool does not take: they compute something else",
        (Attribute.POOL,),
        otlp="manylora.kept_out_workers",
    )
    ETCD_USED_PART = _from_otlp("manylora.etcd.used_part", "gauge", "scheduler", "Used part of etcd's quota")

    # of the worker
    KV_IN_USE = Metric("kv_bytes_in_use", "gauge", "worker", "KV blocks that a tenant holds", _TENANT, "By")
    KV_TENANT_EVICTIONS = Metric(
        "kv_evictions", "counter", "worker", "Sequences that lost their KV and are computed again", _TENANT
    )
    TENANT_PREEMPTIONS = Metric(
        "preemptions", "counter", "worker", "Sequences that gave up their slot to others", _TENANT
    )
    ADAPTER_HITS = Metric(
        "adapter_cache_hits",
        "counter",
        "worker",
        "Requests whose adapter was on the device when they came",
        (Attribute.TENANT_ID, Attribute.ADAPTER_ID),
    )
    ADAPTER_REQUESTS = Metric(
        "adapter_requests",
        "counter",
        "worker",
        "Requests by where their adapter was when they came: device, host, disk, store (far)",
        (Attribute.TENANT_ID, Attribute.TIER),
    )
    ADAPTER_LOADS = Metric(
        "adapter_loads",
        "counter",
        "worker",
        "Adapters that came to a tier: host, device",
        (Attribute.TIER,),
        otlp="manylora.adapter_loads",
    )
    COLD_STARTS = Metric(
        "adapter_cold_start_seconds",
        "histogram",
        "worker",
        "Wait for an adapter, by where it was: host, disk, store (far)",
        (Attribute.TIER,),
        "s",
        _SECONDS,
        otlp="manylora.adapter_cold_start",
    )
    ADAPTERS_RESIDENT = Metric(
        "adapters_resident",
        "gauge",
        "worker",
        "Adapters on a tier: host, device",
        (Attribute.TIER,),
        otlp="manylora.adapters_resident",
    )
    SLOTS_USED = Metric(
        "sequence_slots_used_ratio",
        "gauge",
        "worker",
        "Running sequences, as a part of the device's slots",
        otlp="manylora.slots_used_ratio",
    )
    STEPS = Metric("engine_steps", "counter", "worker", "Forward passes", otlp="manylora.engine_steps")
    STEP_SECONDS = Metric(
        "engine_step_seconds",
        "histogram",
        "worker",
        "A forward pass, by the highest class that ran or waited",
        (Attribute.QOS_CLASS,),
        "s",
        _STEPS,
        "manylora.engine_step_seconds",
    )
    FAILED_STEPS = _from_otlp(
        "manylora.engine_failed_steps",
        "counter",
        "worker",
        "Of these, those that failed, for want of memory or otherwise",
    )
    PREEMPTIONS = _from_otlp("manylora.preemptions", "counter", "worker", "Of all tenants", name="manylora_preemptions")
    KV_EVICTIONS = _from_otlp("manylora.kv.evictions", "counter", "worker", "Of all tenants")
    GUESSED_TOKENS = _from_otlp(
        "manylora.speculation.guessed_tokens", "counter", "worker", "Tokens guessed by prompt lookup or a draft model"
    )
    RIGHT_GUESSES = _from_otlp(
        "manylora.speculation.right_guesses", "counter", "worker", "Of these, those that were drawn"
    )
    KV_SWAPS = _from_otlp("manylora.kv.swaps", "counter", "worker", "Sequences swapped", (Attribute.DIRECTION,))
    KV_SWAPPED_BYTES = _from_otlp(
        "manylora.kv.swapped_bytes", "counter", "worker", "KV copied", (Attribute.DIRECTION,), "By"
    )
    KV_HOST_BYTES = _from_otlp("manylora.kv.host_bytes", "gauge", "worker", "KV in host memory", unit="By")

    # of the worker, in vLLM's names
    VLLM_RUNNING = _vllm("num_requests_running", "gauge", "Sequences in a slot")
    VLLM_WAITING = _vllm("num_requests_waiting", "gauge", "Sequences without one")
    VLLM_KV_USAGE = _vllm("kv_cache_usage_perc", "gauge", "Used part of the KV blocks, 0 to 1")
    VLLM_CACHE_CONFIG = _vllm(
        "cache_config_info", "gauge", "The KV cache", (Attribute.BLOCK_SIZE, Attribute.NUM_BLOCKS)
    )
    VLLM_LORA_INFO = Metric(
        "vllm:lora_requests_info",
        "gauge",
        "worker",
        "Adapters on the device, and those that are waited for; its value is the time",
        (Attribute.MAX_LORA, Attribute.RUNNING_ADAPTERS, Attribute.WAITING_ADAPTERS),
    )
    VLLM_PREEMPTIONS = _vllm("num_preemptions", "counter", "Preempted sequences")
    VLLM_PROMPT_TOKENS = _vllm("prompt_tokens", "counter", "Prompt tokens")
    VLLM_CACHED_TOKENS = _vllm("prompt_tokens_cached", "counter", "Prompt tokens found in the cache")
    VLLM_GENERATION_TOKENS = _vllm("generation_tokens", "counter", "Tokens drawn")
    VLLM_PREFIX_QUERIES = _vllm("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache")
    VLLM_PREFIX_HITS = _vllm("prefix_cache_hits", "counter", "Prompt tokens found there")
    VLLM_SUCCESS = _vllm("request_success", "counter", "Completed requests", (Attribute.FINISH_REASON,))
    VLLM_TTFT = _vllm("time_to_first_token_seconds", "histogram", "On this worker", (), "s", _SECONDS)
    VLLM_ITL = _vllm("inter_token_latency_seconds", "histogram", "Between tokens, a frame's", (), "s", _TOKEN_SECONDS)
    VLLM_TPOT = _vllm("request_time_per_output_token_seconds", "histogram", "A request's mean", (), "s", _TOKEN_SECONDS)
    VLLM_E2E = _vllm("e2e_request_latency_seconds", "histogram", "On this worker", (), "s", _SECONDS)
    VLLM_QUEUE = _vllm("request_queue_time_seconds", "histogram", "Before the first step", (), "s", _SECONDS)
    VLLM_PREFILL = _vllm("request_prefill_time_seconds", "histogram", "To the first token", (), "s", _SECONDS)
    VLLM_DECODE = _vllm("request_decode_time_seconds", "histogram", "After the first token", (), "s", _SECONDS)
    VLLM_REQUEST_PROMPT = _vllm("request_prompt_tokens", "histogram", "Of a request", (), "", _TOKENS)
    VLLM_REQUEST_GENERATION = _vllm("request_generation_tokens", "histogram", "Of a request", (), "", _TOKENS)


ALL: Sequence[Metric] = tuple(each for each in vars(Metrics).values() if isinstance(each, Metric))
POOL_METRICS: Sequence[Metric] = tuple(each for each in ALL if each.name.startswith("manylora_pool_"))
