"""Reads adapters: `python -m manylora_worker.weights.reader_process CONTROL_FD BASE_FD MEMORY_FD`.

A fork server imports torch and forks a reader for each socket sent to it. It stays single-threaded, because a fork
copies other threads' locks. Neither touches a device. Both end with their socket.
"""

# Messages are JSON: the worker must not unpickle what a parser of tenants' files says.
#
#     reader    {"pid"}                       once
#     worker    {"folder", "uid", "keeps", "key"}    uid: what it shall be, or null; keeps: put the weights in memory;
#                                                    key: [owner, id, secret in hex] of sealed files, or null
#     reader    {"elements"}                  with keeps, when all but the weights' values has been checked
#     worker    {"offset"}                    bytes in MEMORY_FD's memory; -1: a descriptor of other memory follows
#     reader    {"ranks", "extras"}           success: the rank at each of the slots, 0 for none; layout.told_extras
#               {"violations"}                [field, description] of each
#               {"error"}                     it could not be read

from __future__ import annotations

import ctypes
import json
import mmap
import os
import pickle
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, NoReturn

import torch
from manylora_shared.encryption.sealing import DataKey, OneKey
from manylora_shared.errors import ManyloraError
from manylora_shared.ids import AdapterUid
from torch import Tensor

from manylora_worker.weights.layout import ranks_by_slot, told_extras
from manylora_worker.weights.packing import Scratch
from manylora_worker.weights.source import AdapterBase, AdapterInvalid, AdapterLimits, read_adapter

_PR_SET_PDEATHSIG = 1
_NICENESS = 10  # the engine comes first where cores are few; a reader holds no lock that it waits for


def main() -> None:
    control_fd, base_fd, memory_fd = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the worker, which may drain: the end of its socket is the end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a reader
    torch.set_num_threads(1)
    os.nice(_NICENESS)
    control = socket.socket(fileno=control_fd)
    with open(base_fd, "rb") as file:
        file.seek(0)  # the position is the worker's too, which has written it
        base, limits = pickle.load(file)
    memory = _mapped(memory_fd)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _run(Connection(descriptors[0]), base, limits, memory)
        os.close(descriptors[0])


def _mapped(fd: int) -> Tensor:
    """[bytes] uint8, the whole file; closes `fd`."""
    memory = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
    os.close(fd)
    return memory


def _run(connection: Connection, base: AdapterBase, limits: AdapterLimits, memory: Tensor) -> NoReturn:
    """Never returns into the fork server's code."""
    try:
        end_with_parent()
        _Reader(connection, base, limits, memory).serve()
    except (EOFError, ConnectionError):
        os._exit(0)  # the worker has ended, or wants no more of this one
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def end_with_parent() -> None:
    """This process, killed when the parent's thread that started it ends. Raises EOFError where that is over."""
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        raise EOFError


class _Reader:
    def __init__(self, connection: Connection, base: AdapterBase, limits: AdapterLimits, memory: Tensor) -> None:
        self._connection = connection
        self._base = base
        self._limits = limits
        self._memory = memory
        self._scratch = Scratch()

    def serve(self) -> NoReturn:
        self._say({"pid": os.getpid()})
        while True:
            request = json.loads(self._connection.recv_bytes())
            self._say(self._answer(Path(request["folder"]), request["uid"], request["key"], keeps=request["keeps"]))

    def _say(self, message: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(message).encode())

    def _answer(self, folder: Path, uid: AdapterUid | None, key: list[str] | None, *, keeps: bool) -> dict[str, Any]:
        allocate = {"allocate": self._allocate} if keeps else {}
        keys = OneKey(DataKey(key[0], key[1], bytes.fromhex(key[2]))) if key is not None else None
        try:
            adapter = read_adapter(
                folder, self._base, self._limits, uid=uid, scratch=self._scratch, keys=keys, **allocate
            )
        except AdapterInvalid as invalid:
            return {"violations": [[v.field, v.description] for v in invalid.violations]}
        except ConnectionError:
            raise
        except (ManyloraError, OSError, RuntimeError, ValueError, MemoryError) as error:
            return {"error": str(error)}
        ranks = ranks_by_slot(adapter.layout, self._base.sites)
        return {"ranks": ranks, "extras": told_extras(adapter.extras)}

    def _allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        self._say({"elements": elements})
        offset = json.loads(self._connection.recv_bytes())["offset"]
        memory = self._memory
        if offset < 0:
            memory, offset = _mapped(recv_handle(self._connection)), 0
        return memory[offset : offset + elements * dtype.itemsize].view(dtype)


if __name__ == "__main__":
    main()
