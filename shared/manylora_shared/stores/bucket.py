"""A bucket of an S3-compatible object store, as adapters' stores and sources use it. Blocks; safe from any thread.

Owns how its errors are told: what the store says of itself is in the log, never in an answer.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore import exceptions
from obstore.store import S3Store

from manylora_shared.errors import InvalidRequest, ServiceUnavailable
from manylora_shared.telemetry.logs import fields

_LOG = logging.getLogger(__name__)

SCHEME = "s3://"
PART_BYTES = 4 << 20
_SENT_PART_BYTES = 8 << 20  # S3 takes no smaller ones than 5 MiB
_PARTS_AT_A_TIME = 4
_RETRY_S = 1.0
IDLE_S = 60.0  # how long the parts of an object may be waited for in all, beside the time that its bytes take
SLOWEST_BYTES_PER_S = 256 << 10
# Of one call: a part of PART_BYTES, or a request without content.
_CLIENT = {"timeout": "30s", "connect_timeout": "5s"}
_RETRIES: Mapping[str, Any] = {"max_retries": 2}
T = TypeVar("T")


class BucketRefuses(ServiceUnavailable):
    """The credentials are missing, wrong or may not do this."""

    label = "store_refused"


class ObjectMissing(Exception):
    """The message is its path."""


@dataclass(frozen=True)
class StoredObject:
    path: str  # relative to the bucket's prefix
    size_bytes: int
    changed_unix_s: float
    e_tag: str | None


def is_bucket(url: str) -> bool:
    return url.startswith(SCHEME)


def split_url(url: str) -> tuple[str, str]:
    """(bucket, prefix) of `s3://bucket/prefix`. Raises ValueError."""
    bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
    prefix = prefix.removesuffix("/")
    if not is_bucket(url) or not bucket or any(mark in url for mark in "?#@%\\") or not url.isprintable():
        raise ValueError("must be s3://BUCKET/PREFIX, without '?', '#', '@', '%' and '\\'")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise ValueError("must not have '.', '..' or nothing between its '/'")
    return bucket, prefix


class Bucket:
    """settings: obstore's of an S3 store; what they leave out is AWS_* of the environment."""

    def __init__(self, url: str, settings: Mapping[str, str] | None = None) -> None:
        bucket, prefix = split_url(url)
        self.url = url
        config: Any = dict(settings or {})
        is_plain = config.get("endpoint", "").startswith("http://")
        client: Any = {**_CLIENT, **({"allow_http": True} if is_plain else {})}
        self._store = S3Store(
            bucket, prefix=prefix or None, config=config, client_options=client, retry_config=_retry_config()
        )

    def head(self, path: str) -> StoredObject:
        """Raises ObjectMissing, ServiceUnavailable."""
        return _stored(self._told(path, lambda: obstore.head(self._store, path)))

    def parts(self, stored: StoredObject) -> Iterator[bytes]:
        """Its content, as it was when `stored` was read. Raises ObjectMissing, ServiceUnavailable, InvalidRequest."""
        first, waited_s = 0, 0.0
        while first < stored.size_bytes:
            if waited_s > IDLE_S + first / SLOWEST_BYTES_PER_S:
                raise ServiceUnavailable("the bucket gives what is asked for too slowly", retry_after_s=_RETRY_S)
            last = min(first + PART_BYTES, stored.size_bytes)
            asked_at = time.monotonic()
            data = self._told(stored.path, functools.partial(self._part, stored, first, last))
            waited_s += time.monotonic() - asked_at
            if len(data) != last - first:
                raise InvalidRequest.of(stored.path, f"is truncated: it ends before its {stored.size_bytes} bytes")
            yield data
            first = last

    def _part(self, stored: StoredObject, first: int, last: int) -> bytes:
        options: Any = {"range": (first, last), "if_match": stored.e_tag}
        return bytes(obstore.get(self._store, stored.path, options=options).bytes())

    def put(self, path: str, file: Path) -> None:
        self._told(
            path,
            lambda: obstore.put(self._store, path, file, chunk_size=_SENT_PART_BYTES, max_concurrency=_PARTS_AT_A_TIME),
        )

    def put_bytes(self, path: str, data: bytes) -> None:
        self._told(path, lambda: obstore.put(self._store, path, data))

    def copy(self, source: str, target: str) -> None:
        """On the store's side; replaces `target`."""
        self._told(source, lambda: obstore.copy(self._store, source, target))

    def delete(self, paths: Sequence[str]) -> None:
        """What is gone is fine."""
        self._told(", ".join(paths), lambda: obstore.delete(self._store, list(paths)))

    def list(self, prefix: str) -> list[StoredObject]:
        """Everything under `prefix/`."""
        return self._told(
            prefix, lambda: [_stored(meta) for page in obstore.list(self._store, prefix) for meta in page]
        )

    def _told(self, path: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except (exceptions.NotFoundError, FileNotFoundError) as error:
            raise ObjectMissing(path) from error
        except exceptions.PreconditionError as error:
            raise InvalidRequest.of(path, "changed while it was read") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            self._log(path, error)
            raise BucketRefuses("the bucket refuses its credentials", retry_after_s=_RETRY_S) from None
        except (exceptions.BaseError, OSError) as error:
            self._log(path, error)
            raise ServiceUnavailable("the bucket cannot be used now", retry_after_s=_RETRY_S) from None

    def _log(self, path: str, error: Exception) -> None:
        _LOG.warning("a bucket does not answer", extra=fields(bucket=self.url, path=path, error=str(error)[:500]))


def _retry_config() -> Any:
    return {**_RETRIES, "retry_timeout": timedelta(seconds=10)}


def _stored(meta: Any) -> StoredObject:
    changed: datetime = meta["last_modified"]
    return StoredObject(meta["path"], meta["size"], changed.timestamp(), meta["e_tag"])
