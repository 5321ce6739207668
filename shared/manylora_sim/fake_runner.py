"""A model that is no model: its next token is a hash of what a right engine would show it. It complains where the
engine breaks kinds/api.py.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NoReturn

from manylora_shared.composition import content_of, uids_of
from manylora_shared.errors import FieldViolation
from manylora_shared.ids import AdapterKey, AdapterUid, TenantId
from manylora_worker.kinds.api import (
    ANY_TOKEN,
    PENDING_TOKEN,
    AdapterEvent,
    AdapterTier,
    Logprobs,
    MergeRefused,
    Sampled,
    Sampling,
    SequenceChunk,
    StepBatch,
    draws_of,
    joined,
)
from manylora_worker.weights.adapter_check import AdapterReport, ChangedModule, Coverage

from manylora_sim.fake_host_kv import FakeHostKv

_CELL = struct.Struct("<II8s")
_CELL_BYTES = _CELL.size
_HEAD = struct.Struct("<QII8s")
_TABLES_BOUND = 1024
_NOTHING_HASHED = hashlib.blake2b(digest_size=16)
_MATRICES = 3  # of an adapter, as it is merged
NO_TOKEN = -7  # of a row whose mask came too late
_HASHED_AT_ONCE = 1024  # over 2,047 bytes hashlib lets go of the interpreter lock, and waits to get it back


class EngineFault(Exception):
    """The engine broke a contract of kinds/api.py."""


# A token's KV is 16 bytes: its id, its position, and a tag of its adapter. The next token is a blake2b over (seed,
# choice, output index, adapter, the whole context as read back through the block table). A wrong block, a missing copy,
# another adapter or position changes the text; `reference_tokens` says, from the request alone, what it must be.
class FakeRunner:
    """Args:
    eos_token_id: drawn with probability 1 / `eos_one_in` and never else; None: no token is special.
    pace: called once a step, to take as long as a model would.
    tenant_of: a sequence's tenant; given, a block that comes from another tenant uncleared is a fault.
    adapters_on_device: given, a chunk whose adapter is not among them is a fault.
    block_copy_s: of one block out and in again.
    copy_polls: how often a copy is asked for before it is over.
    """

    _checks_copies_at_submit = False
    _steps: tuple[FakeStep, ...] = ()  # submitted last; a copy comes behind them

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 259,
        max_context_tokens: int = 4096,
        eos_token_id: int | None = None,
        eos_one_in: int = 64,
        pace: Callable[[StepBatch], None] | None = None,
        tenant_of: Callable[[int], TenantId] | None = None,
        adapters_on_device: Callable[[], Collection[AdapterUid]] | None = None,
        num_host_blocks: int = 0,
        block_copy_s: float = 1e-4,
        copy_polls: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_context_tokens = max_context_tokens
        self.tenant_of = tenant_of
        # whether one tenant may read what another has computed
        self.shares: Callable[[TenantId, TenantId], bool] = lambda reader, writer: False
        self.adapters_on_device = adapters_on_device
        self.faults: list[str] = []
        self._draw = TokenDraw(vocab_size, eos_token_id, eos_one_in)
        self._pace = pace
        self._block_bytes = block_size * _CELL.size
        self._blocks = [bytearray(self._block_bytes) for _ in range(num_blocks)]
        self._tenants: list[TenantId | None] = [None] * num_blocks
        self.host_kv = FakeHostKv(
            self._blocks,
            self._tenants,
            block_size=block_size,
            num_blocks=num_host_blocks,
            block_copy_s=block_copy_s,
            copy_polls=copy_polls,
            steps=lambda: self._steps,
            fail=self._fail,
        )
        # of the sequences seen last, as a runner may keep them on its device
        self._tables: OrderedDict[int, list[int]] = OrderedDict()
        self.merge_problem = ""
        self.unmergeable: Collection[AdapterUid] = ()
        self._merging: tuple[AdapterUid, int] | None = None  # and how many of its matrices are written

    def merge_some(self, uid: AdapterUid) -> bool:
        if uid in self.unmergeable:
            raise MergeRefused("it is unmergeable")
        if self.adapters_on_device is not None and uid not in self.adapters_on_device():
            self._fail(f"{uid} is merged and not on the device")
        self._check_rest()
        merged, written = self._merging or (uid, 0)
        if merged != uid or written == _MATRICES:
            self._fail("a second adapter is merged")
        self._merging = uid, written + 1
        return written + 1 == _MATRICES

    def restore_some(self) -> bool:
        self._check_rest()
        if self._merging is not None:
            uid, written = self._merging
            self._merging = (uid, written - 1) if written > 1 else None
        return self._merging is None

    def _check_rest(self) -> None:
        if any(not step.is_read for step in self._steps):
            self._fail("weights change while a step is under way")

    def _of_merged(self, batch: StepBatch) -> StepBatch:
        if self._merging is None:
            return batch
        uid, written = self._merging
        if batch.chunks and written < _MATRICES:
            self._fail("a step while weights are being written")
        if any(chunk.adapter_uid is not None for chunk in batch.chunks):
            self._fail("an adapter's row is computed with another adapter's weights")
        return replace(batch, chunks=[replace(chunk, adapter_uid=uid) for chunk in batch.chunks])

    def execute(self, batch: StepBatch) -> Sequence[Sampled]:
        batch = self._of_merged(batch)
        if not self._checks_copies_at_submit:
            self.host_kv.check_step(batch)
        for block_id in batch.clear_blocks:
            self._blocks[block_id][:] = bytes(self._block_bytes)
            self._tenants[block_id] = None
        for source, target in batch.copy_blocks:
            writer, before = self._tenants[source], self._tenants[target]
            if before is not None and (writer is None or not self._may_touch(writer, before)):  # as in `_write`
                self._fail(f"block {target} is copied into uncleared")
            self._blocks[target][:] = self._blocks[source]
            self._tenants[target] = self._tenants[source]
        written: dict[int, int] = {}
        for chunk in batch.chunks:
            self._write(chunk, written)
        sampled = [self._answer(chunk) for chunk in batch.chunks if chunk.is_answered]
        if self._pace is not None:
            self._pace(batch)
        return sampled

    def _fail(self, fault: str) -> NoReturn:
        self.faults.append(fault)
        raise EngineFault(fault)

    def _write(self, chunk: SequenceChunk, written: dict[int, int]) -> None:
        # `written`: by block, which of its cells the step has written, as bits
        start, token_ids, block_table = chunk.start_position, chunk.token_ids, chunk.block_table
        size, tenants = self.block_size, self._tenants
        end = start + len(token_ids)
        if end == start:
            self._fail("a chunk without tokens")
        if end > self.max_context_tokens:
            self._fail("past the model's context")
        if end > len(block_table) * size:
            self._fail("the block table ends before the chunk")
        uid = chunk.adapter_uid
        on_device = self.adapters_on_device
        is_merged = self._merging is not None
        if uid is not None and on_device is not None and not is_merged and not set(uids_of(uid)) <= set(on_device()):
            self._fail(f"{uid} is not on the device")
        self._check_table(chunk)
        tag = _adapter_tag(uid)
        tenant = None if self.tenant_of is None else self.tenant_of(chunk.sequence_id)
        if tenant is not None:
            for block_id in block_table[: start // size]:
                if not self._may_touch(tenant, tenants[block_id]):
                    self._fail(f"block {block_id} of {tenants[block_id]} is read by {tenant}")
        position = start
        while position < end:
            block_index, offset = divmod(position, size)
            behind = (block_index + 1) * size
            if behind > end:
                behind = end
            block_id = block_table[block_index]
            cells = ((1 << (behind - position)) - 1) << offset
            before = written.get(block_id, 0)
            if before & cells:
                self._fail(f"block {block_id} is written twice")
            written[block_id] = before | cells
            if tenant is not None:
                # What it brought back from the host into its own block, it may have found in its group's cache before.
                if tenants[block_id] is not None and not self._may_touch(tenant, tenants[block_id]):
                    self._fail(f"block {block_id} crosses tenants uncleared")
                tenants[block_id] = tenant
            block = self._blocks[block_id]
            for at in range(position, behind):
                _CELL.pack_into(block, at % size * _CELL_BYTES, token_ids[at - start], at, tag)
            position = behind

    def _may_touch(self, tenant: TenantId, writer: TenantId | None) -> bool:
        return writer == tenant or (writer is not None and self.shares(tenant, writer))

    def _check_table(self, chunk: SequenceChunk) -> None:
        # a sequence's blocks before the chunk's first one are those that its last chunk had
        known = self._tables.pop(chunk.sequence_id, [])
        if known == chunk.block_table:
            self._tables[chunk.sequence_id] = known
            return
        first = min(len(known), chunk.start_position // self.block_size)
        if known[:first] != chunk.block_table[:first]:
            self._fail("the block table changed before the chunk")
        self._tables[chunk.sequence_id] = list(chunk.block_table)
        if len(self._tables) > _TABLES_BOUND:
            self._tables.popitem(last=False)

    def _answer(self, chunk: SequenceChunk) -> Sampled:
        sampled = Sampled(chunk.sequence_id, 0)
        if chunk.samples:
            end = chunk.start_position + len(chunk.token_ids) - chunk.num_guesses
            draws = [self._sample(draw, end + i) for i, draw in enumerate(draws_of(chunk))]
            (sampled,) = joined([chunk], draws)
        if chunk.scored:
            sampled.scored = [self._score(chunk, position) for position in chunk.scored]
        return sampled

    def _score(self, chunk: SequenceChunk, position: int) -> Logprobs:
        start, end = chunk.start_position, chunk.start_position + len(chunk.token_ids)
        if not start <= position < min(end, len(chunk.prompt_token_ids) - 1):
            self._fail("a position is scored that the chunk does not compute")
        assert chunk.sampling.prompt_logprobs is not None
        context = b"".join(self._blocks[block_id] for block_id in chunk.block_table[: position // self.block_size + 1])
        token_id = chunk.prompt_token_ids[position + 1]
        uid, top = chunk.adapter_uid, chunk.sampling.prompt_logprobs
        return _prompt_logprobs(context[: (position + 1) * _CELL.size], token_id, uid, top)

    def _sample(self, chunk: SequenceChunk, end: int) -> Sampled:
        num_behind = end - len(chunk.prompt_token_ids) - len(chunk.output_token_ids)
        if not 0 <= num_behind <= chunk.num_guesses:
            self._fail("samples before the last token is computed")
        if chunk.output_index != len(chunk.output_token_ids) + num_behind:
            self._fail("the output index is not the output's length")
        blocks = self._blocks
        num_blocks = -(-end // self.block_size)
        context = b"".join([blocks[block_id] for block_id in chunk.block_table[:num_blocks]])
        token_id, logprobs = self._draw.draw(
            chunk.sampling,
            chunk.choice,
            chunk.output_index,
            chunk.adapter_uid,
            memoryview(context)[: end * _CELL.size],
        )
        if chunk.mask_follows:
            self._fail("a mask does not come")
        barred = {token for token, before in chunk.bars if before in (ANY_TOKEN, *chunk.output_token_ids[-1:])}
        allowed, mask = chunk.sampling.allowed_token_ids, chunk.mask
        barred |= set() if mask is None else {i for i in range(self.vocab_size) if not mask[i // 8] >> i % 8 & 1}
        while token_id in barred or (allowed and token_id not in allowed):
            token_id = (token_id + 1) % self.vocab_size
        return Sampled(chunk.sequence_id, token_id, logprobs)


class AheadFakeRunner(FakeRunner):
    """A step is computed when its result is asked for, from what the batch was at `submit`. Faults: a step writes what
    an unread one writes for another request; an adapter goes while an unread step uses it; a step comes before the one
    ahead of it has drawn.
    """

    _checks_copies_at_submit = True

    def submit(self, batch: StepBatch) -> FakeStep:
        unread = [step for step in self._steps if not step.is_read]
        if any(step.awaits_masks for step in unread):
            self._fail("the step before has not drawn")
        if len(unread) > 1:
            self._fail("two steps are in flight already")
        self._check_adapters(batch)
        self.host_kv.check_step(batch)
        step = FakeStep(self, batch, unread[0] if unread else None)
        if unread:
            for block_id, prompt in step.writes.items():
                writer = unread[0].writes.get(block_id)
                if writer is not None and writer is not prompt:
                    self._fail(f"block {block_id} is given away while a step writes it")
        self._steps = (*unread, step)
        return step

    def compute(self, batch: StepBatch, drawn: Mapping[int, int]) -> Sequence[Sampled]:
        self._check_adapters(batch)
        return self.execute(replace(batch, chunks=[self._resolved(chunk, drawn) for chunk in batch.chunks]))

    def _check_adapters(self, batch: StepBatch) -> None:
        on_device = None if self.adapters_on_device is None else self.adapters_on_device()
        for uid in {uid for chunk in batch.chunks if chunk.adapter_uid for uid in uids_of(chunk.adapter_uid)}:
            if on_device is not None and uid not in on_device:
                self._fail(f"{uid} is not on the device")

    def _resolved(self, chunk: SequenceChunk, drawn: Mapping[int, int]) -> SequenceChunk:
        if PENDING_TOKEN not in chunk.token_ids:
            return chunk
        if chunk.sequence_id not in drawn:
            self._fail("a token is pending that the step before did not draw")
        token_id = drawn[chunk.sequence_id]
        return replace(
            chunk,
            token_ids=[token_id if each == PENDING_TOKEN else each for each in chunk.token_ids],
            output_token_ids=[*chunk.output_token_ids, token_id],
        )


class FakeStep:
    def __init__(self, runner: AheadFakeRunner, batch: StepBatch, before: FakeStep | None) -> None:
        copied = [
            replace(chunk, block_table=list(chunk.block_table), output_token_ids=list(chunk.output_token_ids))
            for chunk in batch.chunks
        ]
        self._runner = runner
        self._batch = replace(batch, chunks=copied)
        self._before = before
        self._outcome: Sequence[Sampled] | Exception | None = None
        self.awaits_masks = any(chunk.mask_follows for chunk in copied)
        self._undrawn: dict[int, None] = {}
        # by block: the prompt of the request that writes it in this step; None: it is cleared
        self.writes: dict[int, Sequence[int] | None] = dict.fromkeys(batch.clear_blocks)
        self._follows = before is not None and any(
            PENDING_TOKEN in c.token_ids or not before.writes.keys().isdisjoint(c.block_table) for c in copied
        )
        for chunk in copied:
            first, last = chunk.start_position, chunk.start_position + len(chunk.token_ids) - 1
            written = chunk.block_table[first // runner.block_size : last // runner.block_size + 1]
            self.writes.update(dict.fromkeys(written, chunk.prompt_token_ids))

    @property
    def is_read(self) -> bool:
        return self._outcome is not None

    def is_over(self) -> bool:
        return self.is_read or self.awaits_masks  # the layers are none

    def draw(self, masks: Mapping[int, bytes]) -> None:
        following = {c.sequence_id for c in self._batch.chunks if c.mask_follows}
        if not self.awaits_masks or not set(masks) <= following:
            self._runner._fail("masks come that were not said to follow")
        self.awaits_masks = False
        self._undrawn.update(dict.fromkeys(following - set(masks)))
        masked = [replace(c, mask=masks.get(c.sequence_id, c.mask), mask_follows=False) for c in self._batch.chunks]
        self._batch = replace(self._batch, chunks=masked)

    @property
    def drawn(self) -> Mapping[int, int]:
        """Of a step that was read."""
        return {s.sequence_id: s.token_id for s in self.result() if s.sequence_id not in self._undrawn}

    def result(self) -> Sequence[Sampled]:
        assert self._before is None or self._before.is_read, "results are read in order"
        assert not self.awaits_masks, "it has not drawn"
        if self._outcome is None:
            try:
                drawn = self._before.drawn if self._before is not None and self._follows else {}
                found = self._runner.compute(self._batch, drawn)
                self._outcome = [
                    Sampled(s.sequence_id, NO_TOKEN) if s.sequence_id in self._undrawn else s for s in found
                ]
            except Exception as error:
                self._outcome = error
        self._before = None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class TokenDraw:
    """Temperature 0 makes the text independent of seed and choice; of the others only `top_logprobs` counts."""

    def __init__(self, vocab_size: int, eos_token_id: int | None, eos_one_in: int) -> None:
        assert vocab_size > 1
        assert eos_one_in > 0
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._eos_one_in = eos_one_in

    def draw(
        self,
        sampling: Sampling,
        choice: int,
        output_index: int,
        adapter_uid: AdapterKey | None,
        context: bytes | bytearray | memoryview,
    ) -> tuple[int, Logprobs | None]:
        seed, choice = (0, 0) if sampling.is_greedy else (sampling.seed, choice)
        digest = _NOTHING_HASHED.copy()
        digest.update(_HEAD.pack(seed % 2**64, choice, output_index, _adapter_tag(adapter_uid)))
        for at in range(0, len(context), _HASHED_AT_ONCE):
            digest.update(context[at : at + _HASHED_AT_ONCE])
        value = int.from_bytes(digest.digest(), "little")
        token_id = self._token(value)
        if sampling.top_logprobs is None:
            return token_id, None
        logprob = -(value % 1000) / 1000
        ids = [token_id, *(i for i in range(sampling.top_logprobs + 1) if i != token_id)]
        top = tuple((i, logprob - rank) for rank, i in enumerate(ids[: sampling.top_logprobs]))
        return token_id, Logprobs(logprob, top)

    def _token(self, value: int) -> int:
        eos = self._eos_token_id
        if eos is None:
            return value % self._vocab_size
        value, chance = divmod(value, self._eos_one_in)
        if chance == 0:
            return eos
        token_id = value % (self._vocab_size - 1)
        return token_id + (token_id >= eos)


def reference_tokens(
    prompt_token_ids: Sequence[int],
    adapter_uid: AdapterKey | None,
    seed: int,
    choice: int,
    count: int,
    *,
    greedy: bool = False,
    vocab_size: int = 259,
    eos_token_id: int | None = None,
    eos_one_in: int = 64,
    emitted_token_ids: Sequence[int] = (),
    stop_token_ids: Collection[int] = (),
    min_tokens: int = 0,
    bad_sequences: Collection[tuple[int, ...]] = (),
    allows: Callable[[Sequence[int], int], bool] = lambda output, token_id: True,
) -> list[int]:
    """Up to `count` tokens, `emitted_token_ids` included, ended before the first stop token."""
    draw = TokenDraw(vocab_size, eos_token_id, eos_one_in)
    sampling = Sampling(seed=seed, temperature=0.0 if greedy else 1.0)
    tag = _adapter_tag(adapter_uid)
    context = bytearray()
    for position, token_id in enumerate([*prompt_token_ids, *emitted_token_ids]):
        context += _CELL.pack(token_id, position, tag)
    output = list(emitted_token_ids)
    while len(output) < count:
        token_id, _ = draw.draw(sampling, choice, len(output), adapter_uid, context)
        barred = set(stop_token_ids) if len(output) < min_tokens else set()
        barred |= {word[-1] for word in bad_sequences if (*output, word[-1])[-len(word) :] == word}
        while token_id in barred or not allows(output, token_id):
            token_id = (token_id + 1) % vocab_size
        if token_id in stop_token_ids:
            break
        context += _CELL.pack(token_id, len(prompt_token_ids) + len(output), tag)
        output.append(token_id)
    return output


def reference_prompt_logprobs(
    prompt_token_ids: Sequence[int], adapter_uid: AdapterKey | None, top: int
) -> list[Logprobs]:
    """Of the prompt's tokens from the second on."""
    tag = _adapter_tag(adapter_uid)
    context = bytearray()
    told = []
    for position, (token_id, following) in enumerate(itertools.pairwise(prompt_token_ids)):
        context += _CELL.pack(token_id, position, tag)
        told.append(_prompt_logprobs(bytes(context), following, adapter_uid, top))
    return told


def _prompt_logprobs(context: bytes, token_id: int, adapter_uid: AdapterKey | None, top: int) -> Logprobs:
    digest = hashlib.blake2b(context, digest_size=8, key=_adapter_tag(adapter_uid) + token_id.to_bytes(4, "little"))
    value = int.from_bytes(digest.digest(), "little")
    others = tuple((i, -float(i)) for i in range(top))
    return Logprobs(-(value % 1000) / 1000, others, 1 + value % 7)


class FakeAdapterBackend:
    """A load ends at the first `poll` at or after its time; `when_due` is told that time as the load begins.

    Args:
        clock: seconds.
        load_s: seconds of a load to a tier.
        error_of: why a load to a tier fails; None: it does not.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        size_bytes: Callable[[AdapterUid], int] = lambda uid: 1,
        load_s: Callable[[AdapterUid, AdapterTier], float] = lambda uid, tier: 0.0,
        error_of: Callable[[AdapterUid, AdapterTier], str | None] = lambda uid, tier: None,
    ) -> None:
        self._clock = clock
        self._size_bytes = size_bytes
        self._load_s = load_s
        self._error_of = error_of
        self._loads: dict[AdapterUid, tuple[float, AdapterTier]] = {}
        self.when_due: Callable[[float], object] = lambda due: None  # for who does not poll
        self.on_disk: dict[AdapterUid, None] = {}
        self.on_host: dict[AdapterUid, None] = {}
        self.on_device: dict[AdapterUid, None] = {}
        self.is_closed = False

    def start_host_load(self, uid: AdapterUid) -> None:
        assert uid not in self._loads, "one load an adapter at a time"
        assert uid not in self.on_host
        self._start(uid, AdapterTier.HOST)

    def start_device_load(self, uid: AdapterUid) -> None:
        assert uid not in self._loads, "one load an adapter at a time"
        assert uid in self.on_host
        assert uid not in self.on_device
        self._start(uid, AdapterTier.DEVICE)

    def _start(self, uid: AdapterUid, tier: AdapterTier) -> None:
        due = self._clock() + self._load_s(uid, tier)
        self._loads[uid] = (due, tier)
        self.when_due(due)

    def poll(self) -> Sequence[AdapterEvent]:
        if not self._loads:
            return ()
        now = self._clock()
        events: list[AdapterEvent] = []
        for uid in [uid for uid, (due, _) in self._loads.items() if due <= now]:
            _, tier = self._loads.pop(uid)
            error = self._error_of(uid, tier)
            if error is None:
                held = {AdapterTier.DISK: self.on_disk, AdapterTier.HOST: self.on_host}
                held.get(tier, self.on_device)[uid] = None
            size_bytes = self._size_bytes(uid) if tier is AdapterTier.HOST and error is None else 0
            is_passing = tier is AdapterTier.DISK and error is not None
            events.append(AdapterEvent(uid, tier, size_bytes, error, is_passing))
        return events

    def drop_device(self, uid: AdapterUid) -> None:
        del self.on_device[uid]

    def drop_host(self, uid: AdapterUid) -> None:
        assert uid not in self._loads, "its copy to the device is under way"
        del self.on_host[uid]

    def close(self) -> None:
        self.is_closed = True


class FakeFarBackend(FakeAdapterBackend):
    """A FarBackend whose disk is empty at first; the error of a fetch is a passing one."""

    def is_near(self, uid: AdapterUid) -> bool:
        return uid in self.on_disk

    def start_fetch(self, uid: AdapterUid) -> None:
        assert uid not in self._loads, "one load an adapter at a time"
        assert uid not in self.on_disk
        self._start(uid, AdapterTier.DISK)


class FakeValidator:
    """Finds every adapter good whose path has nothing in `problems`."""

    def __init__(self, problems: Mapping[str, Sequence[FieldViolation]] | None = None) -> None:
        self._problems = problems or {}

    async def validate(self, path: str, uid: AdapterUid) -> AdapterReport:
        if path in self._problems:
            return AdapterReport(problems=self._problems[path])
        modules = tuple(ChangedModule(f"layers.0.{name}", 8) for name in ("q_proj", "v_proj"))
        coverage = Coverage(modules, num_layers=4, num_tensors=4)
        return AdapterReport(
            max_lora_rank=8, size_bytes=1 << 20, target_modules=("q_proj", "v_proj"), coverage=coverage
        )

    def lends(self, path: str, uid: AdapterUid) -> AbstractContextManager[None]:
        return nullcontext()  # FakeAdapterBackend has every adapter

    async def largest_update(self, path: str, uid: AdapterUid) -> str:
        return "that of q_proj"


@functools.lru_cache(maxsize=4096)
def _adapter_tag(adapter_uid: AdapterKey | None) -> bytes:
    """8 bytes that differ from adapter to adapter, and from the base model's zeros."""
    return (
        bytes(8) if adapter_uid is None else hashlib.blake2b(content_of(adapter_uid).encode(), digest_size=8).digest()
    )
