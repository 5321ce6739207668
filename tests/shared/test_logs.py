from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from manylora_shared.coordination.peers import PeerSecret
from manylora_shared.metadata import PEER_KEY
from manylora_shared.telemetry import logs
from manylora_shared.telemetry.logs import JsonFormatter, fields, hide, setup
from manylora_shared.telemetry.redaction import REMOVED
from manylora_shared.transport.grpc_transport import GrpcTransport

from tests.shared.transport_echo import echo_service

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    stream = io.StringIO()
    setup("worker", "info", instance_id="w0", stream=stream)
    yield stream
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_object_with_fields_and_trace(stream: io.StringIO) -> None:
    log = logging.getLogger("manylora_worker.hosting.runtime")
    log.debug("not shown")
    log.info("loaded %d\nlayers", 3, extra=fields(traceparent=PARENT, tenant="acme", blocks=4, adapter="", worker=None))
    (line,) = lines(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "service": "worker",
        "instance": "w0",
        "logger": "manylora_worker.hosting.runtime",
        "message": "loaded 3\nlayers",
        "tenant": "acme",
        "blocks": 4,
        "trace_id": PARENT.split("-")[1],
        "span_id": PARENT.split("-")[2],
    }


def test_exceptions_are_on_the_same_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("what went wrong")
    except ValueError:
        logging.getLogger("x").exception("failed", extra=fields(message="cannot replace", path=object))
    (line,) = lines(stream)
    assert line["message"] == "failed"
    assert "what went wrong" in line["exception"]


@pytest.mark.parametrize("name", ["prompt", "text", "token_ids", "authorization"])
def test_content_is_never_a_field(name: str) -> None:
    with pytest.raises(AssertionError, match="never logged"):
        fields(**{name: "x"})


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="--log-level: 'loud' is not one of"):
        setup("worker", "loud")


KEY = "mlk-0123456789abcdef-" + "5ec2e7" * 10 + "cafe"
SECRET = "feed" * 16


def thrown(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as e:
        return e


@pytest.mark.parametrize(
    "name", ["grpc", "grpc._cython.cygrpc", "asyncio", "manylora_router.front.grpc", "py.warnings"]
)
def test_no_logger_writes_a_planted_secret(stream: io.StringIO, name: str) -> None:
    hide(SECRET)
    log = logging.getLogger(name)
    headers = (("authorization", f"Bearer {KEY}".encode() + b"\xff"), (PEER_KEY, SECRET))
    log.error("call failed: %r", headers)
    log.error(f"call failed: {dict(headers)}")
    log.error("metadata of %s", KEY, extra=fields(error=f"x {KEY} y", peers=[SECRET, KEY], other=headers))
    log.error("failed", exc_info=thrown(ValueError(headers)))
    error = thrown(UnicodeDecodeError("utf-8", headers[0][1], 80, 81, "invalid start byte"))
    log.error("Task exception was never retrieved\nfuture: %r", error, exc_info=error)
    log.error(SECRET[:40] + SECRET)
    assert len(lines(stream)) == 6
    for part in (KEY, KEY[21:], KEY[4:20], SECRET):
        assert part not in stream.getvalue()


def test_arguments_that_do_not_fit_are_told_and_not_shown() -> None:
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "too few: %s %s", (KEY,), None)
    line = JsonFormatter("worker").format(record)
    assert "do not fit" in line
    assert KEY not in line


def test_what_nobody_catches_is_redacted_too(stream: io.StringIO) -> None:
    error = thrown(RuntimeError(KEY))
    sys.excepthook(type(error), error, error.__traceback__)
    thread = threading.Thread(target=lambda: thrown(error) and (_ for _ in ()).throw(error).__next__())
    thread.start()
    thread.join()
    assert [line["message"] for line in lines(stream)] == ["not caught", "not caught in a thread"]
    assert KEY not in stream.getvalue()


def test_a_line_is_bounded(stream: io.StringIO) -> None:
    log, long = logging.getLogger("x"), "begin" + "\xff" * 2_000_000 + "end"
    log.error(long, exc_info=thrown(ValueError(long)), extra=fields(error=long, many=[long] * 1000))
    (line,) = lines(stream)
    assert len(stream.getvalue()) < 100_000  # of ASCII: six for a character that is none
    assert line["message"].startswith("begin")
    assert line["message"].endswith("end")
    assert "characters" in line["message"]


def test_a_place_that_floods_is_cut_off_and_says_so(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = logging.getLogger("x"), 1000.0
    for step in range(3 * logs.MAX_LINES):
        flood(log, now, f"call {step} failed")
    log.error("another place")
    assert len(lines(stream)) == logs.MAX_LINES + 1
    flood(log, now + logs.WINDOW_S, "again")
    assert lines(stream)[-1]["left_out"] == 2 * logs.MAX_LINES
    flood(log, now + logs.WINDOW_S, "again")
    assert "left_out" not in lines(stream)[-1]


def flood(log: logging.Logger, now: float, message: str) -> None:
    record = log.makeRecord(log.name, logging.ERROR, "library.py", 7, message, (), None)
    record.created = now
    log.handle(record)


def field(name: bytes, value: bytes) -> bytes:
    """An HPACK literal without indexing or Huffman."""
    assert len(name) < 127
    more, size = len(value) - 127, bytes([127])
    while more >= 128:
        size, more = size + bytes([more % 128 + 128]), more // 128
    return (
        b"\0" + bytes([len(name)]) + name + (size + bytes([more]) if len(value) >= 127 else bytes([len(value)])) + value
    )


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


async def test_metadata_that_is_not_utf_8_shows_no_key_and_costs_little_log(stream: io.StringIO) -> None:
    """Through gRPC itself, whose own traceback has the headers in it."""
    secret = PeerSecret("a-secret-of-services-0123456789abcdef")
    shown = secret.metadata()[PEER_KEY]
    server = await GrpcTransport().serve("127.0.0.1:0", [echo_service()])
    host, _, port = server.address.rpartition(":")
    method = b"/" + echo_service().descriptor.full_name.encode() + b"/ServerStream"
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
    headers = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", method), (b":authority", b"x"), (b"te", b"trailers"),
        (b"content-type", b"application/grpc"), (b"authorization", b"Bearer " + KEY.encode() + b"\xff"),
        (PEER_KEY.encode(), shown.encode()), (b"x-tenant-id", b"\xff\xfe" * 2000),
    ]  # fmt: skip
    for call in range(200):
        writer.write(frame(1, 4, 2 * call + 1, b"".join(field(*each) for each in headers)))
        writer.write(frame(0, 1, 2 * call + 1, b"\0" * 5))
    await writer.drain()
    async with asyncio.timeout(60):
        while "UnicodeDecodeError" not in stream.getvalue():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    writer.close()
    await server.stop(0)
    assert REMOVED in stream.getvalue()
    for part in (KEY, KEY[21:], shown):
        assert part not in stream.getvalue()
    assert len(stream.getvalue()) < 4_000_000
