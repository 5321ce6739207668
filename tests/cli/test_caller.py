"""A client's words for errors, and what it sends."""

from __future__ import annotations

import random
import time

import pytest
from manylora.client import RequestFailed
from manylora.client.caller import Caller, deadline_of, left_s_of, printable
from manylora_shared.errors import Code, RpcError
from manylora_shared.transport.grpc_transport import UNREACHABLE, GrpcTransport


async def test_a_port_where_nobody_answers_or_that_speaks_http_is_told_so() -> None:
    caller = Caller("host:1", GrpcTransport().connect("127.0.0.1:1"), "", None, random.Random(0))
    told = {
        "connection refused": "nothing answers at host:1",
        "Trying to connect an http1.x server": "host:1 speaks HTTP/1.1",
        "SSL_ERROR_SSL: error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER": "host:1 speaks plain text",
        "Cannot check peer: missing selected ALPN property.": "host:1 speaks HTTPS",
        "OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self-signed": "host:1 has a certificate of nobody",
        "UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed": "host:1 hung up",
    }
    for words, expected in told.items():
        error = RpcError(Code.UNAVAILABLE, words)
        error.label = UNREACHABLE
        assert caller.failed(error).message.startswith(expected)
    assert caller.failed(RpcError(Code.UNAVAILABLE, "no worker")).message == "no worker"
    await caller.channel.close()


def test_what_is_not_printable_is_refused_by_its_key_alone() -> None:
    with pytest.raises(RequestFailed, match="x-adapter-id: must be printable ASCII") as refused:
        printable({"x-tenant-id": "acme", "x-adapter-id": "geheim\n"})
    assert "geheim" not in str(refused.value)


def test_a_deadline_leaves_no_time_behind_it() -> None:
    assert left_s_of(deadline_of(None)) is None
    assert left_s_of(time.monotonic() - 5) == 0.0
