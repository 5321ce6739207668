"""Answers that outlive their callers' connections: for who comes again with a resume token or an idempotency key.

    running --its end--> replayed for REPLAY_S, where it has a key and completed --> gone
       |                     `--where others need its room--> its key alone is kept for that time --> gone
       `--nobody reads for `keep_s`--> cancelled --> gone

Each runs in a task of its own and is kept from its first frame on, within its tenant's bound. Past that bound frames
that were read are dropped: the answer then waits for its slowest reader, and ends with its last one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from manylora_shared.errors import (
    AnsweredElsewhere,
    AnswerLost,
    Cancelled,
    Draining,
    InternalError,
    KeyReused,
    ManyloraError,
    NotFound,
    Overloaded,
    ServiceUnavailable,
)

from manylora_router.front.spent_keys import SpentKeys, spent
from manylora_router.guard.admission import RequestInput
from manylora_router.links.answer_owners import AnswerOwners, Claim, Owner
from manylora_router.request.call import draining
from manylora_router.request.frames import Delta, Frame

_LOG = logging.getLogger(__name__)

REPLAY_S = 600.0
KEY_KEEP_S = 15  # of an answer with an idempotency key, where its caller says nothing else
TENANT_BYTES = 8 << 20
ALL_BYTES = 256 << 20
TENANT_ANSWERS = 256
MAX_READERS = 8  # of one answer
_FREED_S = 0.1  # for a call that comes as the one before it fails
_FRAME_BYTES = 512  # about, as Python keeps it
_TOKEN_BYTES = 40
_LOGPROBS_BYTES = 200

Run = Callable[[RequestInput], AsyncGenerator[Frame]]


class KeptAnswer:
    def __init__(self, kept: KeptAnswers, tenant: str, request: RequestInput) -> None:
        self.request_id = request.request_id
        self.tenant = tenant
        self.key = slot_of(request)
        self.fingerprint = request.fingerprint
        self.keep_s = request.keep_s or KEY_KEEP_S
        self.first = 0  # that is kept
        self.frames: list[Frame] = []
        self.size_bytes = 0
        self.is_over = False  # past the bound
        self.has_ended = False
        self.error: ManyloraError | None = None
        self.at: dict[object, int] = {}  # each reader's next frame
        self.num_tokens = 0  # of all choices
        self.claim = Claim(0, 0)  # of its key
        self.revision = 0  # of its key's record in the store
        self.is_left = False  # that record, to the next router
        self.has_lost_readers = False  # who have a part of it
        self.free_at = 0.0  # its key
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._kept = kept
        self._changed = asyncio.Event()

    @property
    def is_read_in_part(self) -> bool:
        """A caller may come for the rest."""
        return bool(self.at) or self.has_lost_readers

    async def read(self, first: int) -> AsyncGenerator[Frame]:
        """From that frame on. Raises AnswerLost or NotFound where it is not kept, and what the answer ended with."""
        if first == 0 < self.first and self.key:
            told = "its answer is longer than is kept, and cannot be told again; another key does the work again"
            raise AnswerLost(f"idempotency-key: {told}")
        if not self.first <= first <= self.first + len(self.frames):
            raise NotFound(f"frames from {first} on are not kept; {self.first} to {self.first + len(self.frames)} are")
        if len(self.at) >= MAX_READERS:
            raise Overloaded(f"{MAX_READERS} calls read this answer already", retry_after_s=1.0)
        reader = object()
        self.at[reader] = first
        self._kept.attached(self)
        try:
            while True:
                while self.at[reader] < self.first + len(self.frames):
                    frame = self.frames[self.at[reader] - self.first]
                    yield frame
                    self.at[reader] += 1
                    if self.is_over:
                        self._tell()  # who waits for room
                if self.has_ended:
                    break
                await self._changed.wait()
        finally:
            if self.at[reader] < self.first + len(self.frames):
                self.has_lost_readers = True
            del self.at[reader]
            self._tell()
            self._kept.left(self)
        if self.error is not None:
            raise self.error

    def add(self, frame: Frame) -> int:
        """Returns how many bytes that takes. An answer that another router began has all from its first token on."""
        started = frame.started
        if started is not None and started.head:
            parts = [Frame(started=replace(started, head=())), *(Frame(delta=delta) for delta in started.head)]
            rest = replace(frame, started=None)
            parts += [rest] if rest.delta is not None or rest.finished is not None else []
        else:
            parts = [frame]
        for part in parts:
            part.number = self.first + len(self.frames)
            self.frames.append(part)
        self.num_tokens += sum(len(part.delta.token_ids) for part in parts if part.delta is not None)
        size = sum(map(_size_of, parts))
        self.size_bytes += size
        self._tell()
        return size

    def read_lacked(
        self, request_id: str, next_frame: int, emitted: Sequence[tuple[Sequence[int], int]]
    ) -> AsyncGenerator[Frame]:
        """What a caller lacks that has so much of each choice, and the frames before `next_frame` of that request.

        Its tokens may be more than those frames': it had them of another router, and was cut off while this one told it
        the answer from its beginning. Raises as `read`.
        """
        is_this = request_id in ("", self.request_id)
        if is_this and (not emitted or self.first):
            return self.read(next_frame)
        return self._read_behind(emitted, next_frame if is_this else 0)

    async def _read_behind(self, emitted: Sequence[tuple[Sequence[int], int]], first: int) -> AsyncGenerator[Frame]:
        """Frames keep their numbers."""
        had = {choice: [len(token_ids), characters] for choice, (token_ids, characters) in enumerate(emitted)}
        async with aclosing(self.read(0)) as frames:
            async for frame in frames:
                if frame.delta is not None and frame.delta.choice in had:
                    frame = replace(frame, delta=_behind(frame.delta, had[frame.delta.choice]))
                is_new = frame.started is not None or frame.delta is not None or frame.finished is not None
                if frame.number >= first and (is_new or (first and frame.prompt_logprobs)):
                    yield frame

    def end(self, error: ManyloraError | None) -> None:
        self.has_ended, self.error = True, error
        self._tell()

    async def drop_read(self) -> int:
        """Waits until all readers have all, and lets go of it. Returns of how many bytes. Raises Cancelled: nobody is
        there.
        """
        self.is_over = True
        while True:
            if not self.at:
                raise Cancelled("nobody reads it, and its tenant keeps no more")
            if min(self.at.values()) >= self.first + len(self.frames):
                break
            await self._changed.wait()
        freed, self.size_bytes = self.size_bytes, 0
        self.first += len(self.frames)
        self.frames = []
        return freed

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class KeptAnswers:
    def __init__(self, owners: AnswerOwners, getrandbits: Callable[[int], int]) -> None:
        self._owners = owners
        self._getrandbits = getrandbits
        self._by_id: dict[tuple[str, str], KeptAnswer] = {}  # tenant, request id; oldest first
        self._by_key: dict[tuple[str, str], KeptAnswer] = {}
        self._claiming: dict[tuple[str, str], asyncio.Event] = {}
        self._bytes: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._spent = SpentKeys(self._release)
        self._releasing: set[asyncio.Task[None]] = set()
        self._is_closing = False

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, tenant: str, request: RequestInput, request_id: str) -> KeptAnswer | None:
        """By its id, or by its key. Raises KeyReused where another request had that; AnswerLost where its answer had to
        make room, unless the request goes on with a part of it.
        """
        answer = self._by_id.get((tenant, request_id))
        if answer is None and request.idempotency_key:
            answer = self._by_key.get((tenant, slot_of(request)))
        gone = self._spent.fingerprint_of(tenant, slot_of(request)) if answer is None else None
        known = answer.fingerprint if answer is not None else gone
        if known is not None and request.fingerprint and known != request.fingerprint:
            raise KeyReused.of("idempotency-key", "another request had this key")
        if gone is not None and request.resume is None:
            raise spent()
        return answer

    def all(self) -> list[KeptAnswer]:
        return list(self._by_id.values())

    async def id_of(self, tenant: str, key: str) -> str:
        """The request id of the answer with that key, at whichever router; empty: there is none. Raises as `begin`."""
        slot = f"0 {key}"
        answer = self._by_key.get((tenant, slot))
        return answer.request_id if answer is not None else await self._owners.request_of(tenant, digest_of_key(slot))

    async def settled(self, tenant: str, request: RequestInput) -> KeptAnswer | None:
        """By its key, when it is known whose that is. Raises KeyReused."""
        while (claiming := self._claiming.get((tenant, slot_of(request)))) is not None:
            await claiming.wait()
        return self.find(tenant, request, "")

    async def begin(
        self, tenant: str, request: RequestInput, run: Run, *, takes_over: bool = False
    ) -> KeptAnswer | Owner:
        """The answer, or who has its key. takes_over: the key, from whoever has it.

        Raises Overloaded, AnswerLost, AnsweredElsewhere where what it joins has failed, or ServiceUnavailable.
        """
        key = (tenant, slot_of(request))
        if request.idempotency_key and (known := await self.settled(tenant, request)) is not None:
            return known
        self._make_room(tenant)
        # An id that is another call's stands in that one's account: two of one id would be one row of usage.
        own_id = "" if request.joins else request.request_id
        request = replace(request, request_id=own_id or f"{self._getrandbits(128):032x}")
        answer = KeptAnswer(self, tenant, request)
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        self._by_id[tenant, answer.request_id] = answer
        try:
            if request.idempotency_key:
                claiming = self._claiming[key] = asyncio.Event()
                try:
                    claimed = await self._owners.claim(
                        tenant,
                        digest_of_key(key[1]),
                        answer.request_id,
                        takes_over=takes_over,
                        call=request.idempotency_key,
                    )
                    if isinstance(claimed, Owner):
                        self._forget(answer)
                        return claimed
                    if request.joins:  # its caller was told the other one's id already
                        await self._owners.release(tenant, digest_of_key(key[1]), claimed.revision)
                        raise AnsweredElsewhere(
                            "idempotency-key: the call that had it has failed just now", retry_after_s=_FREED_S
                        )
                    answer.claim, answer.revision = claimed, claimed.revision
                    if request.resume is not None:
                        request = replace(request, charged_tokens=claimed.charged_tokens)
                    self._by_key[key] = answer
                    self._spent.taken(*key)
                finally:
                    del self._claiming[key]
                    claiming.set()
        except BaseException:
            self._forget(answer)
            raise
        answer.task = asyncio.create_task(self._run(answer, request, run), name=f"answer {answer.request_id}")
        self.left(answer)
        return answer

    async def close(self) -> None:
        """What still runs is cancelled, as the router stops."""
        self._is_closing = True
        answers = list(self._by_id.values())
        tasks = [answer.task for answer in answers if answer.task is not None]
        for task in tasks:
            task.cancel()
        for answer in answers:
            if answer.timer is not None:
                answer.timer.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(self._leave(answer) for answer in answers if answer.is_read_in_part))
        self._spent.close()
        if self._releasing:
            await asyncio.wait(self._releasing)
        await self._owners.close()

    def attached(self, answer: KeptAnswer) -> None:
        if answer.timer is not None and not answer.has_ended:
            answer.timer.cancel()
            answer.timer = None

    def left(self, answer: KeptAnswer) -> None:
        if answer.at or answer.has_ended or answer.task is None:
            return
        if answer.is_over:
            answer.task.cancel()
        elif answer.timer is None:
            answer.timer = asyncio.get_running_loop().call_later(answer.keep_s, answer.task.cancel)

    async def _work_begins(self, answer: KeptAnswer) -> None:
        """Before its first frame is handed out. Raises AnsweredElsewhere, or ServiceUnavailable."""
        digest = digest_of_key(answer.key)
        answer.revision = await self._owners.begin(answer.tenant, digest, answer.request_id, answer.claim)

    async def _leave(self, answer: KeptAnswer) -> None:
        """To the next router, before anybody is sent there. Where the store is away, what one of its callers has beyond
        the first that comes there is charged again.
        """
        if answer.is_left or not answer.key or not answer.num_tokens:
            return
        is_whole = answer.has_ended and answer.error is None
        if answer.has_ended and not is_whole:
            return
        charged = max(answer.num_tokens, answer.claim.charged_tokens)
        digest = digest_of_key(answer.key)
        try:
            await self._owners.leave(
                answer.tenant, digest, answer.request_id, answer.revision, charged, is_whole=is_whole
            )
        except (AnsweredElsewhere, ServiceUnavailable) as e:
            _LOG.warning("what an answer that is handed over was charged is not known to the next router: %s", e)
        else:
            answer.is_left = True

    async def _run(self, answer: KeptAnswer, request: RequestInput, run: Run) -> None:
        error: ManyloraError | None = None
        try:
            async with aclosing(run(request)) as frames:
                async for frame in frames:
                    if answer.key and answer.first + len(answer.frames) == 0:
                        await self._work_begins(answer)
                    self._bytes[answer.tenant] = self._bytes.get(answer.tenant, 0) + answer.add(frame)
                    if answer.is_over or not self._has_room(answer.tenant):
                        freed = await answer.drop_read()  # the tenant's other answers come and go meanwhile
                        self._bytes[answer.tenant] -= freed
        except ManyloraError as e:
            error = e
            if isinstance(e, Draining):
                await self._leave(answer)
            await self._let_go(answer)
        except asyncio.CancelledError:
            error = draining() if self._is_closing else Cancelled("nobody read it any more")
            raise
        except Exception:
            _LOG.exception("what nobody foresaw ends a kept answer")
            error = InternalError("internal error")
            await self._let_go(answer)
        finally:
            answer.end(error)
            self._ended(answer)

    async def _let_go(self, answer: KeptAnswer) -> None:
        """Of its key."""
        # Before anybody is told that it failed: who asks another router then is not sent here.
        if (releasing := self._forget_key(answer)) is not None:
            await asyncio.wait([releasing])

    def _ended(self, answer: KeptAnswer) -> None:
        if answer.timer is not None:
            answer.timer.cancel()
        loop = asyncio.get_running_loop()
        if answer.error is not None and answer.key:  # the next call with its key does the work
            self._forget_key(answer)
        replayed = answer.error is None and answer.key and not answer.is_over
        answer.free_at = loop.time() + REPLAY_S
        answer.timer = loop.call_later(REPLAY_S if replayed else answer.keep_s, self._expire, answer)

    def _expire(self, answer: KeptAnswer) -> None:
        if answer.at:  # what they have not read yet is of the tenant's bound
            answer.timer = asyncio.get_running_loop().call_later(answer.keep_s, self._expire, answer)
        else:
            self._spend(answer)

    def _has_room(self, tenant: str) -> bool:
        """Lets go of ended answers, where that makes some."""
        while self._bytes.get(tenant, 0) > TENANT_BYTES:
            if not self._spend_oldest(tenant):
                return False
        while sum(self._bytes.values()) > ALL_BYTES:
            # Who has most makes room: never a tenant that has less than this one.
            own, most = self._bytes.get(tenant, 0), self._bytes.get
            ended = (each for each in self._by_id.values() if each.has_ended and each.size_bytes and not each.at)
            oldest = max(ended, key=lambda each: most(each.tenant, 0), default=None)  # of equals the first
            if oldest is None or most(oldest.tenant, 0) < own:
                return False
            self._spend(oldest)
        return True

    def _spend_oldest(self, tenant: str) -> bool:
        """Returns whether it had one."""
        for answer in self._by_id.values():
            if answer.tenant == tenant and answer.has_ended and answer.size_bytes and not answer.at:
                self._spend(answer)
                return True
        return False

    def _make_room(self, tenant: str) -> None:
        """For one more. Raises Overloaded."""
        if self._counts.get(tenant, 0) < TENANT_ANSWERS:
            return
        for answer in self._by_id.values():
            if answer.tenant == tenant and answer.has_ended and not answer.at:
                self._spend(answer)
                return
        raise Overloaded(f"{TENANT_ANSWERS} answers of this tenant are kept here already", retry_after_s=1.0)

    def _spend(self, answer: KeptAnswer) -> None:
        """It goes, and of a completed one the key stays until its time."""
        key = (answer.tenant, answer.key)
        is_early = answer.free_at > asyncio.get_running_loop().time()
        if is_early and answer.error is None and self._by_key.get(key) is answer:
            del self._by_key[key]
            self._spent.add(*key, answer.fingerprint, answer.revision, answer.free_at)
        self._forget(answer)

    def _forget(self, answer: KeptAnswer) -> None:
        if self._by_id.pop((answer.tenant, answer.request_id), None) is None:
            return
        if answer.timer is not None:
            answer.timer.cancel()
        self._forget_key(answer)
        for counts, less in ((self._bytes, answer.size_bytes), (self._counts, 1)):
            left = counts.get(answer.tenant, 0) - less
            counts[answer.tenant] = left
            if not left:
                del counts[answer.tenant]

    def _forget_key(self, answer: KeptAnswer) -> asyncio.Task[None] | None:
        """Returns what lets go of its record."""
        if self._by_key.get((answer.tenant, answer.key)) is not answer:
            return None
        del self._by_key[answer.tenant, answer.key]
        return None if answer.is_left else self._release(answer.tenant, answer.key, answer.revision)

    def _release(self, tenant: str, key: str, revision: int) -> asyncio.Task[None]:
        releasing = self._owners.release(tenant, digest_of_key(key), revision)
        task = asyncio.create_task(releasing, name="release key")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
        return task


def _behind(delta: Delta, had: list[int]) -> Delta | None:
    """`had`: tokens, and characters of them that are still to come."""
    tokens = min(len(delta.token_ids), max(0, had[0] - delta.first_position))
    characters = min(len(delta.text), had[1])
    had[1] -= characters
    rest = replace(
        delta,
        first_position=delta.first_position + tokens,
        token_ids=delta.token_ids[tokens:],
        text=delta.text[characters:],
        logprobs=delta.logprobs[tokens:],
    )
    return rest if rest.token_ids or rest.text else None


def slot_of(request: RequestInput) -> str:
    """What stands for its idempotency key; empty: it has none."""
    return f"{request.part} {request.idempotency_key}" if request.idempotency_key else ""


def digest_of_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _size_of(frame: Frame) -> int:
    size = _FRAME_BYTES + len(frame.prompt_logprobs) * _LOGPROBS_BYTES
    if frame.started is not None:
        size += len(frame.started.prompt_token_ids) * _TOKEN_BYTES
    if (delta := frame.delta) is not None:
        size += len(delta.token_ids) * _TOKEN_BYTES + 4 * len(delta.text)
        size += sum(_LOGPROBS_BYTES + _TOKEN_BYTES * len(each.top) for each in delta.logprobs)
    return size
