"""Builds a worker's engine of its parts and the worker's settings."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable
from typing import TypeVar

from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.hosting.runtime import Mailbox, ThreadRuntime
from manylora_worker.kinds.api import state_blocks_of
from manylora_worker.memory.prefix_cache import SECRET_BYTES, PrefixKeys, PrefixOptions
from manylora_worker.models.parts import EngineParts, ModelInfo
from manylora_worker.planning.step_planner import PlannerLimits
from manylora_worker.planning.step_targets import StepTargets

_LOG = logging.getLogger(__name__)

C = TypeVar("C", bound=WorkerConfig)
# takes the settings, and a call for any thread of the backend when it has news; raises ValueError: the model cannot
# be served so
EngineBuilder = Callable[[C, Callable[[], None]], EngineParts]

_REQUESTS_PER_SLOT = 4
_OVERTAKES_PER_SLOT = 2  # of one whose adapter finds no room: fewer leave slots empty while pins run out


def host(config: C, build: EngineBuilder[C]) -> tuple[ThreadRuntime, EngineParts]:
    """Raises ValueError, as the builder."""
    mailbox = Mailbox()
    parts = build(config, mailbox.wake)
    limits = dataclasses.replace(engine_limits(config), longest_context_tokens=parts.model.longest)
    arena = limits.arena_of(parts.runner)
    state_blocks = state_blocks_of(parts.runner)
    capacity_blocks = (parts.runner.num_blocks if arena is None else arena.least_kv) - state_blocks
    capacity_tokens = capacity_blocks * parts.runner.block_size
    model = dataclasses.replace(
        parts.model,
        max_context_tokens=min(parts.model.max_context_tokens, capacity_tokens),
        longest_context_tokens=min(parts.model.longest_context_tokens, capacity_tokens),
    )
    prefix = None if state_blocks else prefix_options(config, model, secrets.token_bytes(SECRET_BYTES))
    if state_blocks:
        _LOG.info(
            "%s has recurrent layers: no prefix cache, no speculation; a sequence's state takes %d of %d blocks, as %d "
            "tokens do",
            model.name, state_blocks, parts.runner.num_blocks, state_blocks * parts.runner.block_size,
        )  # fmt: skip
    core = EngineCore(parts.runner, parts.backend, limits, prefix, clears_freed=config.debug_fill_freed)
    return ThreadRuntime(core, parts.backend, model, mailbox, max_requests=limits.max_requests), parts


def engine_limits(config: WorkerConfig) -> EngineLimits:
    return EngineLimits(
        planner=PlannerLimits(
            max_batch_tokens=config.max_batch_tokens,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            sequence_slots=config.sequence_slots,
            targets=StepTargets(
                interactive=config.interactive_step_ms / 1e3 or None,
                standard=config.target_step_ms / 1e3 or None,
                batch=config.batch_step_ms / 1e3 or None,
            ),
        ),
        adapters=AdapterCacheLimits(
            host_bytes=config.host_adapter_bytes,
            device_bytes=config.device_adapter_bytes,
            max_overtakes=_OVERTAKES_PER_SLOT * config.sequence_slots,
        ),
        guesses=config.prefetch,
        arena_bytes=config.arena_adapter_bytes,
        max_requests=max(_REQUESTS_PER_SLOT * config.sequence_slots, config.sequence_slots + config.parked_sequences),
    )


def prefix_options(config: WorkerConfig, model: ModelInfo, secret: bytes) -> PrefixOptions | None:
    """None: no prefix cache."""
    if config.prefix_cache_share == 0:
        return None
    return PrefixOptions(PrefixKeys(secret, model.digest), config.prefix_cache_share)
