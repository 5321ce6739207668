"""The login to etcd: a user and a password from a file, and the token that they gave last."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

from manylora_shared.coordination import rpc_pb2 as pb
from manylora_shared.coordination.base import StoreUnavailable
from manylora_shared.coordination.peers import read_secret
from manylora_shared.errors import Code, RpcError
from manylora_shared.telemetry.logs import hide
from manylora_shared.transport.base import Channel, Method

TOKEN_KEY = "token"
RETRY_S = 1.0  # a refused login costs etcd a slow hash
_AUTHENTICATE = Method(
    "/etcdserverpb.Auth/Authenticate",
    pb.AuthenticateRequest,
    pb.AuthenticateResponse,
    client_streaming=False,
    server_streaming=False,
)


class EtcdLogin:
    """The file is read at every login, so that a changed password needs no restart."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, or ValueError where the file is not `user:password`."""
        self._path = path
        self._token = ""
        self._lock = asyncio.Lock()
        self._refusal: StoreUnavailable | None = None
        self._again_at = 0.0
        self._read()

    async def metadata(self, channel: Channel, timeout_s: float) -> dict[str, str]:
        """Raises RpcError where etcd is not reached, StoreUnavailable where it refuses the login."""
        async with self._lock:
            if not self._token:
                self._token = await self._authenticate(channel, timeout_s)
            return {TOKEN_KEY: self._token}

    def forget(self, metadata: dict[str, str]) -> None:
        """A token that etcd does not know any more."""
        if self._token == metadata.get(TOKEN_KEY):
            self._token = ""

    async def _authenticate(self, channel: Channel, timeout_s: float) -> str:
        now = asyncio.get_running_loop().time()
        if self._refusal is not None and now < self._again_at:
            raise self._refusal
        self._refusal = None
        try:
            user, password = await asyncio.to_thread(self._read)
            request = pb.AuthenticateRequest(name=user, password=password)
            token = str((await channel.call(_AUTHENTICATE, request, timeout=timeout_s)).token)
        except RpcError as e:
            if e.code not in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION):
                raise
            self._refuse(f"etcd refuses the login of {self._path}: {e.message}", now)
        except (OSError, ValueError) as e:
            self._refuse(f"--etcd-login-file: {e}", now)
        hide(token, is_passing=True)
        return token

    def _refuse(self, message: str, now: float) -> NoReturn:
        self._refusal = StoreUnavailable(message)
        self._again_at = now + RETRY_S
        raise self._refusal

    def _read(self) -> tuple[str, str]:
        user, colon, password = read_secret(self._path).partition(":")
        if not (user and colon and password):
            raise ValueError(f"{self._path}: is not `user:password`")
        hide(password)
        return user, password


def is_stale(error: RpcError) -> bool:
    """Whether the call was not carried out because its token is of another time."""
    return error.code is Code.UNAUTHENTICATED or "revision of auth store is old" in error.message
