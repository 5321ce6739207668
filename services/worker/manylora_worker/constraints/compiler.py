"""Constraints to grammars over the model's vocabulary, compiled on threads of its own, in turns of their tenants. Keeps
a tenant's last ones.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer
from manylora_shared.constraints.constraint import Constraint
from manylora_shared.constraints.grammar import LIMITS, grammar_of, panics_as_errors
from manylora_shared.errors import InvalidRequest, Unready
from manylora_shared.ids import TenantId
from manylora_shared.process.deep_threads import DeepThreads

from manylora_worker.constraints.masks import ConstraintMatcher, Lane
from manylora_worker.kinds.constraint import Matcher

TENANT_BYTES = 32 << 20
_KNOWN_TENANTS = 64
_COMPILE_THREADS = 2
_MASK_THREADS = 8
_LEAST_BYTES = 1 << 17  # of one that is compiled, measured; and for each byte of its grammar
_BYTES_A_BYTE = 64
_RETRY_S = 60.0  # before a tokenizer that could not be used is read again: a folder may have been away


@dataclass(frozen=True)
class Vocabulary:
    """tokenizer_json: of tokenizers. vocab_size: the width of the model's logits."""

    tokenizer_json: str
    vocab_size: int
    end_token_ids: Sequence[int]


@dataclass(frozen=True, eq=False)
class Compiled:
    """See kinds.constraint.CompiledConstraint."""

    grammar: LLMatcher
    lane: Lane
    end_token_ids: Sequence[int]
    vocab_size: int
    size_bytes: int

    def matcher(self) -> Matcher:
        return ConstraintMatcher(self.grammar, self.lane, self.vocab_size)


class _Tenant:
    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.compiled: OrderedDict[bytes, Compiled] = OrderedDict()
        self.size_bytes = 0


@dataclass(frozen=True, eq=False)
class _Asked:
    constraint: Constraint
    digest: bytes
    future: Future[Compiled]


class ConstraintCompiler:
    def __init__(self, load: Callable[[], Vocabulary], notify: Callable[[], None]) -> None:
        """load: called with the first constraint; what it raises is told. notify: from any thread, with masks."""
        self._load = load
        self._notify = notify
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: tuple[LLTokenizer, Vocabulary] | None = None
        self._failed: tuple[Exception, float] | None = None  # and until when it is told without reading again
        self._tenants: OrderedDict[TenantId, _Tenant] = OrderedDict()
        self._waiting: dict[TenantId, deque[_Asked]] = {}  # the first one's turn is next
        self._compiling = DeepThreads(_COMPILE_THREADS, "constraint-compiler")
        self._masking = ThreadPoolExecutor(_MASK_THREADS, "constraint-masks")

    def compile(self, tenant_id: TenantId, constraint: Constraint) -> Future[Compiled]:
        """Its exceptions: InvalidRequest; Unready: the model has no tokenizer that can be read."""
        digest = constraint.digest
        future: Future[Compiled] = Future()
        if (found := self._find(tenant_id, digest)) is not None:
            future.set_result(found)
            return future
        with self._lock:
            self._waiting.setdefault(tenant_id, deque()).append(_Asked(constraint, digest, future))
        self._compiling.submit(self._take_turn)
        return future

    def close(self) -> None:
        for pool in (self._compiling, self._masking):
            pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = [asked for each in self._waiting.values() for asked in each]
            self._waiting.clear()
        for asked in waiting:
            asked.future.cancel()

    def _take_turn(self) -> None:
        with self._lock:
            if not self._waiting:  # closed
                return
            tenant_id, waiting = next(iter(self._waiting.items()))
            del self._waiting[tenant_id]
            asked = waiting.popleft()
            if waiting:
                self._waiting[tenant_id] = waiting
        if not asked.future.set_running_or_notify_cancel():
            return
        try:
            asked.future.set_result(self._compile(tenant_id, asked.constraint, asked.digest))
        except BaseException as error:  # as an executor does: whoever waits has it
            asked.future.set_exception(error)

    def _find(self, tenant_id: TenantId, digest: bytes) -> Compiled | None:
        with self._lock:
            tenant = self._tenants.get(tenant_id)
            if tenant is None or digest not in tenant.compiled:
                return None
            self._tenants.move_to_end(tenant_id)
            tenant.compiled.move_to_end(digest)
            return tenant.compiled[digest]

    def _compile(self, tenant_id: TenantId, constraint: Constraint, digest: bytes) -> Compiled:
        tokenizer, words = self._read_tokenizer()
        try:
            with panics_as_errors():
                grammar = grammar_of(constraint)
                matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest.of(constraint.field, str(error)[:400]) from error
        if matcher.is_error():
            raise InvalidRequest.of(constraint.field, " ".join(matcher.get_error().split())[:400])
        size_bytes = _LEAST_BYTES + _BYTES_A_BYTE * len(grammar)
        with self._lock:
            tenant = self._tenants.get(tenant_id)
            if tenant is None:
                tenant = self._tenants[tenant_id] = _Tenant(Lane(self._masking, self._notify))
                if len(self._tenants) > _KNOWN_TENANTS:
                    self._tenants.popitem(last=False)
            compiled = Compiled(matcher, tenant.lane, list(words.end_token_ids), words.vocab_size, size_bytes)
            if digest not in tenant.compiled and size_bytes <= TENANT_BYTES:
                tenant.compiled[digest] = compiled
                tenant.size_bytes += size_bytes
                while tenant.size_bytes > TENANT_BYTES:
                    tenant.size_bytes -= tenant.compiled.popitem(last=False)[1].size_bytes
            return compiled

    def _read_tokenizer(self) -> tuple[LLTokenizer, Vocabulary]:
        with self._tokenizer_lock:
            if self._tokenizer is not None:
                return self._tokenizer
            if self._failed is None or time.monotonic() >= self._failed[1]:
                try:
                    with panics_as_errors():
                        self._tokenizer = self._loaded()
                    return self._tokenizer
                except Exception as error:  # whatever its readers raise is about the model's files
                    self._failed = (error, time.monotonic() + _RETRY_S)
            cause = self._failed[0]
            raise Unready(f"constraint: the model's tokenizer cannot be used for it: {cause}") from cause

    def _loaded(self) -> tuple[LLTokenizer, Vocabulary]:
        words = self._load()
        if not words.end_token_ids:
            raise ValueError("it has no end-of-sequence token")
        ends = list(words.end_token_ids)
        return LLTokenizer(words.tokenizer_json, n_vocab=words.vocab_size, eos_token=ends), words
