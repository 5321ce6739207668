"""Where adapters may be brought from beside an upload: buckets, https, a hub. Owns the operator's rules, and the
threads that read.

Nobody's credentials but a rule's are used for a tenant, and a rule holds below its prefix alone.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import yaml
from manylora_shared.errors import DeadlineExceeded, InvalidRequest, PermissionDenied
from manylora_shared.process.config import environment
from manylora_shared.stores.access import read_access, secret_of
from manylora_shared.stores.adapter_files import (
    CONFIG_NAME,
    DEFAULT_MAX_WEIGHTS_BYTES,
    FILE_NAMES,
    MAX_CHUNK_BYTES,
    MAX_CONFIG_BYTES,
    AdapterFiles,
)
from manylora_shared.stores.adapter_tokenizer import FILE_NAMES as TOKENIZER_NAMES
from manylora_shared.stores.adapter_tokenizer import MAX_FILE_BYTES, BroughtTokenizer, brought_by
from manylora_shared.stores.bucket import Bucket, ObjectMissing, is_bucket, split_url
from manylora_shared.stores.model_files import hub_snapshot
from manylora_shared.stores.web_folder import WebFolder

ANYBODY = "*"
MAX_URL_CHARS = 1024
MAX_READS = 32  # at a time: one for each upload that a router takes
IDLE_S = 60.0  # how long a source may be waited for in all, beside the time that its bytes take
SLOWEST_BYTES_PER_S = 256 * 1024
_HUB = re.compile(r"hf://([A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+)(?:@([A-Za-z0-9_.-]+))?")
_DEFAULT_HUB = "https://huggingface.co"
_KEYS = ("prefix", "tenants", "access", "token", "private")
T = TypeVar("T")


@dataclass(frozen=True)
class SourceRule:
    prefix: str  # ends with "/"
    tenants: frozenset[str] = frozenset()  # beside operators
    access: Mapping[str, str] = field(default_factory=dict)  # as read_access takes it
    token: str = ""  # env:NAME or file:PATH
    private: bool = False  # its host may be on a private network, and speak plain http

    def covers(self, url: str) -> bool:
        # a rule is of a repository, not of a revision
        place = url.partition("@")[0] if url.startswith("hf://") else url
        return f"{place}/".startswith(self.prefix)

    def lets(self, tenant_id: str, *, is_operator: bool) -> bool:
        return is_operator or bool(self.tenants & {tenant_id, ANYBODY})


def read_rules(path: str) -> tuple[SourceRule, ...]:
    """Of a YAML file, a list of mappings; empty: none. Raises ValueError, OSError."""
    if not path:
        return ()
    try:
        written: Any = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: is not YAML: {error}") from error
    if not isinstance(written, list):
        raise ValueError(f"{path}: must be a list of rules")
    return tuple(_rule(f"{path}: rule {number}", each) for number, each in enumerate(written, 1))


def _rule(where: str, written: Any) -> SourceRule:
    if not isinstance(written, Mapping) or set(written) - set(_KEYS):
        raise ValueError(f"{where}: must be a mapping of {', '.join(_KEYS)}")
    prefix, tenants = written.get("prefix"), written.get("tenants", [])
    if not isinstance(prefix, str) or not prefix.startswith(("s3://", "https://", "hf://")):
        raise ValueError(f"{where}: prefix: must begin with s3://, https:// or hf://")
    if not isinstance(tenants, list) or not all(isinstance(each, str) for each in tenants):
        raise ValueError(f"{where}: tenants: must be a list of names, or of '{ANYBODY}'")
    access, token, private = written.get("access", {}), written.get("token", ""), written.get("private", False)
    if not isinstance(token, str) or not isinstance(private, bool):
        raise ValueError(f"{where}: token: must be a text, and private true or false")
    try:
        read_access(access)
        if token:
            secret_of(token, "token")
    except (ValueError, OSError) as error:
        raise ValueError(f"{where}: {error}") from error
    return SourceRule(prefix.rstrip("/") + "/", frozenset(tenants), access, token, private)


class _Folder(Protocol):
    def open(self, name: str) -> tuple[int | None, Iterator[bytes]] | None: ...

    def close(self) -> None: ...


class _BucketFolder:
    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def open(self, name: str) -> tuple[int | None, Iterator[bytes]] | None:
        try:
            stored = self._bucket.head(name)
        except ObjectMissing:
            return None
        return stored.size_bytes, self._bucket.parts(stored)

    def close(self) -> None:
        pass  # each of its calls has a time limit


class _LocalFolder:
    """Of the hub's cache, which keeps its files behind links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, name: str) -> tuple[int | None, Iterator[bytes]] | None:
        path = self._folder / name
        return (path.stat().st_size, self._parts(path)) if path.is_file() else None

    def _parts(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            while part := file.read(MAX_CHUNK_BYTES):
                yield part

    def close(self) -> None:
        pass


class Sources:
    def __init__(self, rules: tuple[SourceRule, ...], *, max_weights_bytes: int = DEFAULT_MAX_WEIGHTS_BYTES) -> None:
        self._rules = rules
        self._max_weights_bytes = max_weights_bytes
        self._threads = ThreadPoolExecutor(MAX_READS, thread_name_prefix="source")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def rule_for(self, url: str, tenant_id: str, *, is_operator: bool) -> SourceRule | None:
        """The rules of the narrowest prefix decide. None: an operator's, which no rule names.

        Raises PermissionDenied, InvalidRequest.
        """
        _check_form(url)
        covering = [rule for rule in self._rules if rule.covers(url.rstrip("/"))]
        narrowest = max((rule.prefix for rule in covering), key=len, default="")
        found = [r for r in covering if r.prefix == narrowest and r.lets(tenant_id, is_operator=is_operator)]
        if not found and not is_operator:
            # the same whatever is there, and whoever else may take it
            raise PermissionDenied("header.source: no rule of this cluster lets the tenant take adapters from there")
        return found[0] if found else None

    async def bring(
        self, url: str, tenant_id: str, *, is_operator: bool, files: AdapterFiles, incoming: str
    ) -> BroughtTokenizer:
        """Appends the files to `incoming`.

        Raises:
            PermissionDenied, InvalidRequest: there is none for this caller, or not an adapter.
            ServiceUnavailable, DeadlineExceeded: not now.
        """
        rule = self.rule_for(url, tenant_id, is_operator=is_operator)
        folder = await self._in_thread(_open, url, rule)
        budget = _Budget()
        try:
            for name in FILE_NAMES:
                limit = MAX_CONFIG_BYTES if name == CONFIG_NAME else self._max_weights_bytes
                found = False
                async for part in self._parts(folder, name, limit, budget):
                    found = True
                    for first in range(0, len(part), MAX_CHUNK_BYTES):
                        await files.append(incoming, name, part[first : first + MAX_CHUNK_BYTES])
                if not found:
                    raise InvalidRequest.of(name, "is missing, or empty, in the source")
            with tempfile.TemporaryDirectory(prefix="manylora-source-") as beside:
                for name in TOKENIZER_NAMES:
                    content = [part async for part in self._parts(folder, name, MAX_FILE_BYTES, budget)]
                    if content:
                        await self._in_thread((Path(beside) / name).write_bytes, b"".join(content))
                return await self._in_thread(lambda: brought_by(Path(beside), follows_links=False))
        finally:
            folder.close()

    async def _parts(self, folder: _Folder, name: str, limit_bytes: int, budget: _Budget) -> Any:
        opened = await self._timed(folder, budget, folder.open, name)
        if opened is None:
            return
        size_bytes, parts = opened
        if size_bytes is not None and size_bytes > limit_bytes:
            raise InvalidRequest.of(name, f"has {size_bytes} bytes, more than {limit_bytes}")
        read_bytes = 0
        while part := await self._timed(folder, budget, next, parts, b""):
            read_bytes += len(part)
            budget.read_bytes += len(part)
            if read_bytes > limit_bytes:
                raise InvalidRequest.of(name, f"has more than {limit_bytes} bytes")
            yield part

    async def _timed(self, folder: _Folder, budget: _Budget, work: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        try:
            async with asyncio.timeout(budget.left_s):
                return await self._in_thread(work, *arguments)
        except TimeoutError:
            folder.close()
            raise DeadlineExceeded(
                f"source: is more than {IDLE_S:g} seconds behind {SLOWEST_BYTES_PER_S // 1024} KiB a second"
            ) from None
        finally:
            budget.waited_s += loop.time() - asked_at

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


@dataclass
class _Budget:
    read_bytes: int = 0
    waited_s: float = 0.0

    @property
    def left_s(self) -> float:
        return max(0.0, IDLE_S + self.read_bytes / SLOWEST_BYTES_PER_S - self.waited_s)


def _check_form(url: str) -> None:
    """Raises InvalidRequest. What rules compare has one spelling."""
    problem = ""
    if len(url) > MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url:
        problem = f"must be at most {MAX_URL_CHARS} printable characters, without blanks"
    elif url.startswith("hf://"):
        found = _HUB.fullmatch(url)
        if found is None or any(set(part) == {"."} for part in found[1].split("/")):
            problem = "must be hf://ORG/NAME or hf://ORG/NAME@REVISION"
    elif is_bucket(url):
        try:
            split_url(url)
        except ValueError as error:
            problem = str(error)
    elif url.startswith("https://"):
        try:
            parts = urlsplit(url)
            has_port = parts.port != 0
        except ValueError as error:
            raise InvalidRequest.of("header.source", f"is no address: {error}") from error
        steps = parts.path.strip("/").split("/")
        if (
            not parts.hostname
            or not has_port
            or any(mark in url for mark in "?#@%\\;")
            or any(s in (".", "..") for s in steps)
            or "//" in parts.path
        ):
            problem = "must be https://HOST/PATH of a folder, without a user, a query, '%', '.' and '..'"
        elif parts.netloc != parts.netloc.lower():
            problem = "must have its host in small letters"
    else:
        problem = "must begin with s3://, https:// or hf://"
    if problem:
        raise InvalidRequest.of("header.source", problem)


def _open(url: str, rule: SourceRule | None) -> _Folder:
    """rule: None: the process's own credentials, which are an operator's."""
    if is_bucket(url):
        if rule is None:
            return _BucketFolder(Bucket(url))
        anonymous = {} if "access_key_id" in rule.access else {"skip_signature": "true"}
        return _BucketFolder(Bucket(url, {**read_access(rule.access), **anonymous}))
    token = secret_of(rule.token, "token") if rule is not None and rule.token else ""
    is_private = rule is not None and rule.private
    found = _HUB.fullmatch(url)
    if found is None:
        return WebFolder(url.rstrip("/") + "/", token=token, is_trusted=is_private)
    env, revision = environment(), found[2] or "main"
    if env.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        snapshot = hub_snapshot(found[1], revision, env)
        if snapshot is None:
            raise InvalidRequest.of("header.source", "is not in the local hub cache, and the hub is not asked")
        return _LocalFolder(snapshot)
    if rule is None and env.get("HF_TOKEN"):
        token = secret_of("env:HF_TOKEN", "token")
    hub = env.get("HF_ENDPOINT", "").rstrip("/")
    return WebFolder(f"{hub or _DEFAULT_HUB}/{found[1]}/resolve/{revision}/", token=token, is_trusted=bool(hub))
