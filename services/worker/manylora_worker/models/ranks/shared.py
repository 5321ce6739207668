"""Rank 0's runner and backend in front of all ranks': what is done here is told to the others first, and in order.

A step is told and not waited for: every rank draws the same tokens from the same logits. An adapter is where the core
takes it to be when all ranks have it there. A step that fails on one rank ends the worker: the others cannot be brought
back to the same place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from manylora_shared.ids import AdapterUid

from manylora_worker.kinds.api import (
    AdapterEvent,
    AdapterTier,
    AheadStep,
    FarBackend,
    HostKv,
    ModelRunner,
    PendingCopy,
    RunnerLost,
    Sampled,
    StepBatch,
    state_blocks_of,
)
from manylora_worker.models.ranks.followers import Followers
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.models.ranks.plans import PlanWriter

_LOOK_S = 50e-6
_STEP_S = 300.0  # the first of a kind compiles kernels


@runtime_checkable
class OwnRunner(ModelRunner, Protocol):
    @property
    def host_kv(self) -> HostKv: ...


@runtime_checkable
class OwnAheadRunner(OwnRunner, Protocol):
    def submit(self, batch: StepBatch) -> AheadStep: ...

    def forget_graphs(self) -> None: ...


class OwnBackend(FarBackend, Protocol):
    def lent(self, uid: AdapterUid) -> str | None:
        """Where in the store it has been lent for this adapter, of which the other ranks have not heard."""


def share(own: ModelRunner, followers: Followers) -> SharedRunner:
    if isinstance(own, OwnAheadRunner):
        return SharedAheadRunner(own, followers)
    assert isinstance(own, OwnRunner)
    return SharedRunner(own, followers)


class SharedRunner:
    """See api.SwapRunner, RecurrentRunner and LosableRunner. own: rank 0's."""

    def __init__(self, own: OwnRunner, followers: Followers) -> None:
        self._own = own
        self._followers = followers
        self._plans = PlanWriter(own.block_size)
        self.host_kv = SharedHostKv(own.host_kv, followers)
        self.num_blocks = own.num_blocks
        self.block_size = own.block_size
        self.vocab_size = own.vocab_size
        self.max_context_tokens = own.max_context_tokens
        self.state_blocks = state_blocks_of(own)

    def check(self) -> None:
        self._followers.check()

    def execute(self, batch: StepBatch) -> Sequence[Sampled]:
        self._tell(batch)
        try:
            return self._own.execute(batch)
        except Exception as error:
            raise _lost(self._followers, error) from error

    def _tell(self, batch: StepBatch) -> None:
        self._followers.check()
        self._followers.send("step", self._plans.write(batch))


class SharedAheadRunner(SharedRunner):
    """See api.AheadRunner."""

    def __init__(self, own: OwnAheadRunner, followers: Followers) -> None:
        super().__init__(own, followers)
        self._ahead = own

    def submit(self, batch: StepBatch) -> AheadStep:
        self._tell(batch)
        try:
            return _SharedStep(self._ahead.submit(batch), self._followers)
        except Exception as error:
            raise _lost(self._followers, error) from error


def _lost(followers: Followers, error: Exception) -> Exception:
    followers.lose(f"rank 0 failed in a step: {type(error).__name__}: {error}")
    return RunnerLost(followers.lost)


class _SharedStep:
    """See api.AheadStep."""

    def __init__(self, own: AheadStep, followers: Followers) -> None:
        self._own = own
        self._followers = followers

    def is_over(self) -> bool:
        return self._own.is_over()

    def draw(self, masks: Mapping[int, bytes]) -> None:
        self._followers.send("draw", dict(masks))
        try:
            self._own.draw(masks)
        except Exception as error:
            raise _lost(self._followers, error) from error

    def result(self) -> Sequence[Sampled]:
        # Looks again and again: the device would wait for a lost rank for ever.
        deadline = time.monotonic() + _STEP_S
        while not self._own.is_over():
            self._followers.check()
            if time.monotonic() > deadline:
                self._followers.lose(f"a step is not over after {_STEP_S:.0f} s")
            time.sleep(_LOOK_S)
        return self._own.result()


class SharedHostKv:
    """See api.HostKv. Every rank copies its heads' share of the blocks."""

    def __init__(self, own: HostKv, followers: Followers) -> None:
        self._own = own
        self._followers = followers
        self._num_copies = 0
        self.num_blocks = own.num_blocks
        self.block_copy_s = own.block_copy_s

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> PendingCopy:
        return self._copy("copy_out", self._own.copy_out, blocks, host_blocks)

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> PendingCopy:
        return self._copy("copy_in", self._own.copy_in, host_blocks, blocks)

    def _copy(self, name: str, copy: _Copy, sources: Sequence[int], targets: Sequence[int]) -> PendingCopy:
        self._num_copies += 1
        self._followers.send(name, self._num_copies, list(sources), list(targets))
        return _SharedCopy(copy(sources, targets), self._num_copies, self._followers)


class _Copy(Protocol):
    def __call__(self, sources: Sequence[int], targets: Sequence[int], /) -> PendingCopy: ...


class _SharedCopy:
    """Where it is over here, the other ranks' later steps come behind theirs."""

    def __init__(self, own: PendingCopy, number: int, followers: Followers) -> None:
        self._own = own
        self._number = number
        self._followers = followers
        self._is_told = False

    @property
    def seconds(self) -> float:
        return self._own.seconds

    def is_over(self) -> bool:
        if not self._own.is_over():
            return False
        self._tell()
        return True

    def wait(self) -> None:
        self._own.wait()
        self._tell()

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._followers.send("copied", self._number)


class SharedBackend:
    """See api.FarBackend. All ranks share the machine's disk: rank 0 fetches for them."""

    def __init__(self, own: OwnBackend, own_runner: ModelRunner, followers: Followers, group: RankGroup) -> None:
        self._own = own
        self._followers = followers
        self._group = group
        self._own_runner = own_runner
        self._heard: dict[tuple[AdapterUid, AdapterTier], list[AdapterEvent]] = {}

    def is_near(self, uid: AdapterUid) -> bool:
        return self._own.is_near(uid)

    def start_fetch(self, uid: AdapterUid) -> None:
        self._own.start_fetch(uid)

    def start_host_load(self, uid: AdapterUid) -> None:
        self._followers.send("start_host_load", uid, self._own.lent(uid))
        self._own.start_host_load(uid)

    def start_device_load(self, uid: AdapterUid) -> None:
        self._followers.send("start_device_load", uid)
        self._own.start_device_load(uid)

    def drop_device(self, uid: AdapterUid) -> None:
        self._followers.send("drop_device", uid)
        self._own.drop_device(uid)

    def drop_host(self, uid: AdapterUid) -> None:
        self._followers.send("drop_host", uid)
        self._own.drop_host(uid)

    def poll(self) -> Sequence[AdapterEvent]:
        """Raises RunnerLost."""
        self._followers.check()
        return [
            event if event.tier is AdapterTier.DISK else self._merged(event.uid, event.tier)
            for event in (*self._own.poll(), *self._followers.take_events())
            if event.tier is AdapterTier.DISK or self._is_last(event)
        ]

    def close(self) -> None:
        self._own.close()
        self._followers.close()
        if isinstance(self._own_runner, OwnAheadRunner):
            self._own_runner.forget_graphs()  # a group does not end before the graphs that it is part of
        self._group.close()

    def _is_last(self, event: AdapterEvent) -> bool:
        heard = self._heard.setdefault((event.uid, event.tier), [])
        heard.append(event)
        return len(heard) == self._group.size

    def _merged(self, uid: AdapterUid, tier: AdapterTier) -> AdapterEvent:
        events = self._heard.pop((uid, tier))
        failed = next((event for event in events if event.error is not None), None)
        if failed is not None:  # some may have it there
            if tier is AdapterTier.DEVICE:
                self.drop_device(uid)
            else:
                self.drop_host(uid)
            return replace(failed, size_bytes=0)
        return AdapterEvent(uid, tier, max(event.size_bytes for event in events))
