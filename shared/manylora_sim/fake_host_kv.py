"""The host memory of a FakeRunner: copies that take as many polls as they are told to. Complains where the engine
breaks api.HostKv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from manylora_shared.ids import TenantId
from manylora_worker.kinds.api import StepBatch


class Step(Protocol):
    @property
    def is_read(self) -> bool: ...


class FakeHostKv:
    """Args:
    tenants: by block of the device.
    steps: those that a copy which starts now comes behind.
    fail: raises, with what the engine did wrong.
    """

    def __init__(
        self,
        blocks: Sequence[bytearray],
        tenants: list[TenantId | None],
        *,
        block_size: int,
        num_blocks: int,
        block_copy_s: float,
        copy_polls: int,
        steps: Callable[[], Sequence[Step]],
        fail: Callable[[str], NoReturn],
    ) -> None:
        self.num_blocks = num_blocks
        self.block_copy_s = block_copy_s
        self._blocks = blocks
        self._tenants = tenants
        self._block_size = block_size
        self._copy_polls = copy_polls
        self._steps = steps
        self._fail = fail
        self._copies: list[FakeCopy] = []  # not over
        # what was copied out, and whose it was
        self._host: list[tuple[bytes, TenantId | None] | None] = [None] * num_blocks

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> FakeCopy:
        return self._start(blocks, host_blocks, is_out=True)

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> FakeCopy:
        return self._start(blocks, host_blocks, is_out=False)

    def _start(self, blocks: Sequence[int], host_blocks: Sequence[int], *, is_out: bool) -> FakeCopy:
        copy = FakeCopy(
            self, list(blocks), list(host_blocks), is_out=is_out, num_polls=self._copy_polls, behind=self._steps()
        )
        for other in self._copies:
            if not set(copy.host_blocks).isdisjoint(other.host_blocks):
                self._fail("a host block is in two copies")
            if not (copy.is_out and other.is_out) and not set(copy.blocks).isdisjoint(other.blocks):
                self._fail("a block that is being copied is copied again")
        self._copies.append(copy)
        return copy

    def finish(self, copy: FakeCopy) -> None:
        self._copies.remove(copy)
        for block_id, host_block in zip(copy.blocks, copy.host_blocks, strict=True):
            if copy.is_out:
                self._host[host_block] = (bytes(self._blocks[block_id]), self._tenants[block_id])
                continue
            found = self._host[host_block]
            if found is None:
                self._fail(f"host block {host_block} is read before it was written")
            self._blocks[block_id][:], self._tenants[block_id] = found

    def check_step(self, batch: StepBatch) -> None:
        """A step writes nothing that is being copied, and reads nothing that is being copied into."""
        if not self._copies:
            return
        size = self._block_size
        read, written = {source for source, _ in batch.copy_blocks}, {target for _, target in batch.copy_blocks}
        written.update(batch.clear_blocks)
        for chunk in batch.chunks:
            first, behind = chunk.start_position // size, -(-(chunk.start_position + len(chunk.token_ids)) // size)
            read.update(chunk.block_table[:behind])
            written.update(chunk.block_table[first:behind])
        for copy in self._copies:
            touched = written if copy.is_out else read | written
            if not touched.isdisjoint(copy.blocks):
                self._fail("a step touches blocks that are being copied")


class FakeCopy:
    """It reads and writes when it is over."""

    seconds = 0.0

    def __init__(
        self,
        host_kv: FakeHostKv,
        blocks: list[int],
        host_blocks: list[int],
        *,
        is_out: bool,
        num_polls: int,
        behind: Sequence[Step],
    ) -> None:
        self._host_kv = host_kv
        self.blocks = blocks
        self.host_blocks = host_blocks
        self.is_out = is_out
        self._polls_left = num_polls
        self._behind = behind  # steps that come before it
        self._is_over = False

    def is_over(self) -> bool:
        if not self._is_over and all(step.is_read for step in self._behind):
            self._polls_left -= 1
            if self._polls_left < 0:
                self.wait()
        return self._is_over

    def wait(self) -> None:
        assert all(step.is_read for step in self._behind), "a step in front of it was not ended"
        if not self._is_over:
            self._is_over = True
            self.seconds = self._host_kv.block_copy_s / 2 * len(self.blocks)
            self._host_kv.finish(self)
