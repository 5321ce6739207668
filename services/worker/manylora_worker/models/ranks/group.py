"""The ranks of a worker that shares one model among processes, and what they compute together. One a process.

Every rank makes the same calls in the same order. The sums are the same to the last bit on all of them.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from manylora_shared.process.config import set_default
from torch import Tensor

_LOG = logging.getLogger(__name__)


class RankGroup:
    """Args:
    store: a file that all ranks see, and that is not there yet. Returns when all have come.
    is_symmetric: whether GPUs sum by kernels that read one another's memory, where they can, in place of NCCL. A
        process can do so in one group: another raises RuntimeError.
    """

    _is_first_symmetric = True  # of this process

    def __init__(self, rank: int, size: int, device: torch.device, store: Path, *, is_symmetric: bool = True) -> None:
        self._is_symmetric = is_symmetric and device.type == "cuda" and _reach_one_another(device, rank, size)
        if self._is_symmetric:
            if not RankGroup._is_first_symmetric:  # torch counts a process's meetings, and new ones begin at none
                raise RuntimeError("this process has met others over symmetric memory: new ones would wait for ever")
            RankGroup._is_first_symmetric = False
            # NVLink's multicast, which two-shot sums do not use, is not to be had on every host
            set_default("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._symmetric: set[int] = set()
        self.rank = rank
        self.size = size
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(str(store), size),
            rank=rank,
            world_size=size,
            device_id=device if device.type == "cuda" else None,
        )

    def summed_buffer(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Zeroes, whose first rows are summed fastest."""
        if not self._is_symmetric:
            return torch.zeros(rows, columns, dtype=dtype, device=self.device)
        buffer: Tensor = symmetric_memory.empty(rows, columns, dtype=dtype, device=self.device).zero_()
        symmetric_memory.rendezvous(buffer, dist.group.WORLD)
        self._symmetric.add(buffer.data_ptr())
        return buffer

    def all_reduce(self, x: Tensor) -> None:
        """In place."""
        if x.data_ptr() in self._symmetric:
            torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", dist.group.WORLD.group_name)
        else:
            dist.all_reduce(x)

    def gather_columns(self, part: Tensor, gathered: Tensor, out: Tensor) -> None:
        """Args:
        part: [rows, columns], contiguous: a rank's columns of `out`, of which the last rank may have fewer.
        gathered: [size, rows, columns], overwritten.
        out: [rows, all columns].
        """
        # all_gather_into_tensor has another name from one version to the next
        dist.group.WORLD._allgather_base(gathered.view(-1, part.shape[1]), part).wait()
        for first, columns in zip(range(0, out.shape[1], part.shape[1]), gathered.unbind(0), strict=False):
            out[:, first : first + part.shape[1]].copy_(columns[:, : out.shape[1] - first])

    def largest(self, x: Tensor) -> None:
        """Element by element of all ranks', in place."""
        dist.all_reduce(x, dist.ReduceOp.MAX)

    def least(self, value: int) -> int:
        """Of all ranks' values."""
        found = torch.tensor(value, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def close(self) -> None:
        """Waits for no other rank: one that is gone would never come."""
        if self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()
        elif dist.is_initialized():
            dist.destroy_process_group()


def _reach_one_another(device: torch.device, rank: int, size: int) -> bool:
    # a rank's device stands behind those of the ranks before it
    first = (device.index or 0) - rank
    devices = range(first, first + size)
    reach = all(torch.cuda.can_device_access_peer(one, two) for one in devices for two in devices if one != two)
    if not reach and rank == 0:
        _LOG.warning("GPUs %d to %d do not read one another's memory: ranks sum by NCCL", devices[0], devices[-1])
    return reach
