"""Prefixes that an operator has declared public: every tenant's requests to the base model find them.

Owns what is declared, and the blocks in which it stands: a tree, each block behind the one that it follows. Nobody is
told apart by them, so there is no key: a block is found by its own tokens behind its parent's.

They are computed by the engine itself, one prefix after the other, in requests of no tenant (`PUBLIC`), and held until
they are withdrawn, whether anybody uses them or not. So whether a prefix is there says nothing of any tenant, and who
begins with it is neither charged for its tokens nor do its blocks count against them. The blocks are PUBLIC's: they are
cleared as any block is that goes to another owner.

Written by EngineCore and Prefixes alone. What is declared beyond `max_blocks` is left out, from the ends on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_shared.telemetry.logs import fields

from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory.block_pool import BlockPool

_LOG = logging.getLogger(__name__)

PUBLIC = TenantId("*")
"""Whose the blocks and the requests are. No tenant can have this name."""
MAX_ATTEMPTS = 3
"""A prefix whose step fails so often is not tried again until it is declared anew."""
_ROOT = -1


@dataclass(eq=False)
class _Prefix:
    name: str
    token_ids: tuple[int, ...]
    """Of whole blocks."""
    num_attempts: int = 0


@dataclass
class _Computing:
    """The prefix that a request of the engine's own computes."""

    prefix: _Prefix
    request_id: RequestId
    blocks: list[int] = field(default_factory=list)
    """That it has added to the tree."""


class PublicPrefixes:
    """
    Args:
        max_blocks: that prefixes may hold together. 0: there are none.
        max_tokens: of one prefix.
    """

    def __init__(self, pool: BlockPool, max_blocks: int, max_tokens: int) -> None:
        self._pool = pool
        self._max_blocks = max_blocks
        self._max_tokens = max_tokens
        self._num_declared_blocks = 0
        self._children: dict[tuple[int, tuple[int, ...]], int] = {}
        """By parent, or _ROOT, and the block's tokens."""
        self._due: list[_Prefix] = []
        self._computing: _Computing | None = None
        self._num_begun = 0
        self._num_requests = 0

    @property
    def num_blocks(self) -> int:
        """That stand, and are held."""
        return len(self._children)

    @property
    def num_declared_blocks(self) -> int:
        """That are to stand: more than `num_blocks` while prefixes are computed, and where that failed."""
        return self._num_declared_blocks

    @property
    def blocks(self) -> set[int]:
        return set(self._children.values())

    @property
    def computing(self) -> RequestId | None:
        """The engine's own request."""
        return None if self._computing is None else self._computing.request_id

    @property
    def num_requests(self) -> int:
        """Of the engine's own that are there: one, and those that it has given up and that linger."""
        return self._num_requests

    @property
    def is_due(self) -> bool:
        """Whether a prefix waits to be computed, and none is."""
        return self._computing is None and bool(self._due)

    def declare(self, prefixes: Mapping[str, SequenceOf[int]]) -> None:
        """These are public from now on, by name, and no others. What stands and is declared still stays; the rest is
        found no more, and free when nobody holds it. Abort `computing` before."""
        self._computing = None
        self._due = []
        size = self._pool.block_size
        wanted: dict[tuple[int, tuple[int, ...]], int] = {}
        """As `_children`, of blocks that are numbered here."""
        for name, declared in sorted(prefixes.items()):
            token_ids = tuple(declared)
            num_blocks, parent = 0, _ROOT
            for start in range(0, min(len(token_ids), self._max_tokens) // size * size, size):
                key = (parent, token_ids[start : start + size])
                if key not in wanted and len(wanted) == self._max_blocks:
                    break
                parent = wanted.setdefault(key, len(wanted))
                num_blocks += 1
            if num_blocks < len(token_ids) // size:
                kept = fields(prefix=name, tokens=len(token_ids), kept_tokens=num_blocks * size)
                _LOG.warning("there is no room to keep all of a public prefix", extra=kept)
            if num_blocks:
                self._due.append(_Prefix(name, token_ids[: num_blocks * size]))
        self._num_declared_blocks = len(wanted)
        stays = {block_id for prefix in self._due for block_id in self._walk(prefix.token_ids)}
        self._forget(self.blocks - stays)
        self._skip_computed()

    def find(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Of the sequence's first `num_blocks`, all full, those that stand here."""
        if not self._children or sequence.group.request.adapter_uid is not None:
            return []
        most = min(num_blocks, len(self._children))  # whoever waits asks in each plan, with a prompt of any length
        return self._walk(sequence.tokens(0, most * self._pool.block_size))

    def next_request(self) -> EngineRequest:
        """Begins to compute a prefix that is due: the request that does it."""
        assert self.is_due
        prefix = self._due.pop(0)
        prefix.num_attempts += 1
        self._num_begun += 1
        self._num_requests += 1
        request_id = RequestId(f"public prefix {self._num_begun}")
        self._computing = _Computing(prefix, request_id)
        return EngineRequest(
            request_id=request_id,
            tenant_id=PUBLIC,
            qos_class=QosClass.BATCH,
            adapter_uid=None,
            prompt_token_ids=prefix.token_ids,
            max_tokens=1,
            sampling=Sampling(seed=0, temperature=0.0),
        )

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """The KV of the tokens [start, end) of the engine's own request has filled its blocks."""
        computing, size = self._computing, self._pool.block_size
        if computing is None or sequence.group.request.request_id != computing.request_id:
            return  # it was declared anew meanwhile
        token_ids = computing.prefix.token_ids
        for index in range(start // size, min(end, len(token_ids)) // size):
            parent = sequence.block_table[index - 1] if index else _ROOT
            key = (parent, token_ids[index * size : (index + 1) * size])
            if key not in self._children:
                self._pool.keep(sequence.block_table[index])
                self._children[key] = sequence.block_table[index]
                computing.blocks.append(sequence.block_table[index])

    def withdraw(self, request_id: RequestId) -> None:
        """The engine's own request ends in an error: what it has computed is in doubt."""
        if self._computing is not None and self._computing.request_id == request_id:
            self._forget(set(self._computing.blocks))

    def ended(self, request_id: RequestId) -> None:
        """Nothing of the engine's own request is left."""
        self._num_requests -= 1
        computing = self._computing
        if computing is None or computing.request_id != request_id:
            return
        self._computing = None
        prefix = computing.prefix
        if not self._stands(prefix):
            if prefix.num_attempts < MAX_ATTEMPTS:
                self._due.insert(0, prefix)
            else:
                _LOG.error("a public prefix cannot be computed", extra=fields(prefix=prefix.name))
        self._skip_computed()

    def check_invariants(self) -> None:
        blocks = list(self._children.values())
        assert len(set(blocks)) == len(blocks), "a block has two names"
        assert len(blocks) <= self._num_declared_blocks <= self._max_blocks
        assert all(self._pool.owner_of(block_id) == PUBLIC for block_id in blocks)
        assert self._pool.kept_blocks() == set(blocks)
        assert all(parent == _ROOT or parent in blocks for parent, _ in self._children), "a block has lost its parent"

    def _walk(self, token_ids: tuple[int, ...]) -> list[int]:
        size, parent = self._pool.block_size, _ROOT
        found: list[int] = []
        for start in range(0, len(token_ids), size):
            block_id = self._children.get((parent, token_ids[start : start + size]))
            if block_id is None:
                break
            found.append(block_id)
            parent = block_id
        return found

    def _stands(self, prefix: _Prefix) -> bool:
        return len(self._walk(prefix.token_ids)) * self._pool.block_size == len(prefix.token_ids)

    def _skip_computed(self) -> None:
        """One prefix may be a part of another."""
        self._due = [prefix for prefix in self._due if not self._stands(prefix)]

    def _forget(self, block_ids: set[int]) -> None:
        """With a block all that follow it are among them."""
        for key in [key for key, block_id in self._children.items() if block_id in block_ids]:
            self._pool.let_go(self._children.pop(key))
