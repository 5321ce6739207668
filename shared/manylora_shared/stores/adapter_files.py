"""The adapter store: folders with adapter files, immutable and named by their content. Routers write, workers read, any
number of both.
"""

#     <root>/objects/<digest>/adapter_config.json, adapter_model.safetensors      never changed once there
#     <root>/sealed/<digest>/<tenant>/...                      the same, sealed with the data key of the tenant it is of
#     <root>/incoming/<random>/...                                             one adapter while it is being added
#     <root>/<any other folder>                                                where an operator lays adapters to import
#
# An incoming folder belongs to the one call that began it, and ends as an object (`commit`) or not at all (`discard`;
# `sweep` after a crash).

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from manylora_shared.encryption.sealing import NoKeys, OpeningKeys, Sealed, SealingKeys
from manylora_shared.errors import DataLost, FieldViolation, InvalidRequest
from manylora_shared.ids import AdapterDigest, AdapterUid, TenantId, adapter_uid, digest_of, is_digest, is_uid, owner_of
from manylora_shared.stores.adapter_rope import with_rope
from manylora_shared.stores.adapter_tokenizer import BroughtTokenizer, brought_by
from manylora_shared.stores.stored_files import FolderSealer, StoredFile, stored_file
from manylora_shared.telemetry.logs import fields

_LOG = logging.getLogger(__name__)

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
FILE_NAMES = (CONFIG_NAME, WEIGHTS_NAME)
OBJECTS = "objects"
SEALED = "sealed"
INCOMING = "incoming"
DOCUMENTS = "documents"  # documents.py
OWN_FOLDERS = (OBJECTS, SEALED, INCOMING, DOCUMENTS)
_TRASH = "trash-"

MAX_CHUNK_BYTES = 1 << 20
MAX_CONFIG_BYTES = 1 << 20
MAX_CONFIG_DEPTH = 32
MAX_CONFIG_VALUES = 16_384  # by its commas and opening brackets, those in texts included
MAX_DIGITS = 40  # of a whole number in a configuration
DEFAULT_MAX_WEIGHTS_BYTES = 4 << 30
_COPY_BYTES = 4 << 20
_DOMAIN = b"manylora-adapter-v1\0"


def canonical_config(config: dict[str, Any]) -> bytes:
    return json.dumps(config, sort_keys=True, separators=(",", ":")).encode()


def adapter_digest(config: dict[str, Any], safetensors: Path) -> AdapterDigest:
    """sha256 in hex over domain, length of the canonical configuration (8 bytes, big-endian), configuration, weight
    file.
    """
    hasher = content_hasher(config)
    with safetensors.open("rb") as file:
        while block := file.read(_COPY_BYTES):
            hasher.update(block)
    return AdapterDigest(hasher.hexdigest())


def digest_of_content(config: dict[str, Any], safetensors: memoryview) -> AdapterDigest:
    """As `adapter_digest`, of a weight file's content."""
    hasher = content_hasher(config)
    hasher.update(safetensors)
    return AdapterDigest(hasher.hexdigest())


def content_hasher(config: dict[str, Any]) -> hashlib._Hash:
    encoded = canonical_config(config)
    return hashlib.sha256(_DOMAIN + len(encoded).to_bytes(8, "big") + encoded)


def object_path(digest: AdapterDigest) -> str:
    """Relative to the store's root."""
    assert is_digest(digest)
    return f"{OBJECTS}/{digest}"


def sealed_path(uid: AdapterUid) -> str:
    """Relative to the store's root. uid: whose it is, too."""
    owner = owner_of(uid)
    assert owner is not None, uid
    assert is_digest(digest_of(uid))
    return f"{SEALED}/{digest_of(uid)}/{owner}"


def parse_config(data: bytes) -> dict[str, Any]:
    """Raises InvalidRequest where it is no JSON object of finite numbers and distinct keys."""
    if len(data) > MAX_CONFIG_BYTES:
        raise InvalidRequest.of(CONFIG_NAME, f"has {len(data)} bytes, more than {MAX_CONFIG_BYTES}")
    # Counted before anything is parsed: the parser holds the interpreter, and with it everybody's requests.
    if (num_values := sum(data.count(mark) for mark in (b",", b"[", b"{"))) > MAX_CONFIG_VALUES:
        raise InvalidRequest.of(CONFIG_NAME, f"has some {num_values} values, more than {MAX_CONFIG_VALUES}")
    try:
        loaded: Any = json.loads(
            data,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_short_int,
            object_pairs_hook=_refuse_duplicates,
        )
    except (ValueError, RecursionError) as e:
        raise InvalidRequest.of(CONFIG_NAME, f"is not JSON: {e}") from e
    if not isinstance(loaded, dict):
        raise InvalidRequest.of(CONFIG_NAME, "must be a JSON object")
    if _is_deeper(loaded, MAX_CONFIG_DEPTH):
        raise InvalidRequest.of(CONFIG_NAME, f"nests deeper than {MAX_CONFIG_DEPTH} levels")
    try:
        json.dumps(loaded, ensure_ascii=False).encode()  # no halves of characters, which no message can carry
    except (UnicodeEncodeError, ValueError, RecursionError) as e:
        raise InvalidRequest.of(CONFIG_NAME, f"cannot be written again as JSON: {e}") from e
    return loaded


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:MAX_DIGITS]} is too large")
    return number


def _short_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits, more than {MAX_DIGITS}")
    return int(text)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name[:80]!r} is given twice")
        found[name] = value
    return found


def _is_deeper(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels + 1):
        nested = [each for each in level if isinstance(each, dict | list)]
        if not nested:
            return False
        level = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
    return True


def resolve_inside(root: Path, relative: str, *, field: str) -> Path:
    """The folder `relative` inside `root`, reached without any symbolic link.

    Raises:
        InvalidRequest: naming `field`: it is absolute, has `..` or NUL in it, passes a link, or is no folder.
    """
    parts = relative.split("/")
    if not relative or "\0" in relative or "\\" in relative:
        raise InvalidRequest.of(field, "must be a relative path with '/' between its parts")
    if os.path.isabs(relative):
        raise InvalidRequest.of(field, "must be relative to the adapter store's root")
    if ".." in parts:
        raise InvalidRequest.of(field, "must not have '..' in it")
    path = root
    try:
        for part in parts:
            if part in ("", "."):
                continue
            path = path / part
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                raise InvalidRequest.of(field, "passes a symbolic link; the store follows none")
            if not stat.S_ISDIR(mode):
                raise InvalidRequest.of(field, "is not a folder")
    except OSError as e:
        raise InvalidRequest.of(field, f"cannot be read in the adapter store: {os.strerror(e.errno or 0)}") from e
    real_root, real = os.path.realpath(root), os.path.realpath(path)
    if real == real_root or os.path.commonpath([real_root, real]) != real_root:
        raise InvalidRequest.of(field, "is not inside the adapter store")
    return path


def open_regular(path: Path, *, field: str, follows_links: bool = False) -> int:
    """Raises InvalidRequest where `path` is missing, a link (which only a caller's own files may be), or no regular
    file.
    """
    links = 0 if follows_links else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDONLY | links | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as e:
        raise InvalidRequest.of(field, "is missing" + _instead_of(path)) from e
    except OSError as e:
        if path.is_symlink() and not follows_links:
            raise InvalidRequest.of(field, "is a symbolic link; the store follows none") from e
        raise InvalidRequest.of(field, f"cannot be read: {os.strerror(e.errno or 0)}") from e
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidRequest.of(field, "is not a regular file")
    return descriptor


def _instead_of(path: Path) -> str:
    pickle = path.with_name("adapter_model.bin")
    if path.name == WEIGHTS_NAME and os.path.lexists(pickle):
        return f"; {pickle.name} is a pickle file, which is never read: save the adapter as safetensors"
    return ""


def check_chunk(file_name: str, data: bytes, size_bytes: int, limits: dict[str, int]) -> None:
    """Raises InvalidRequest."""
    if file_name not in FILE_NAMES:
        hint = "; pickle files are never read" if file_name.endswith((".bin", ".pt", ".pth", ".pkl")) else ""
        shown = file_name if len(file_name) <= 80 else file_name[:80] + "..."
        raise InvalidRequest.of("chunk.file_name", f"{shown!r} is not one of {', '.join(FILE_NAMES)}{hint}")
    if len(data) > MAX_CHUNK_BYTES:
        raise InvalidRequest.of("chunk.data", f"has {len(data)} bytes, more than {MAX_CHUNK_BYTES}")
    if size_bytes + len(data) > limits[file_name]:
        raise InvalidRequest.of(file_name, f"has more than {limits[file_name]} bytes")


class AdapterFiles(Protocol):
    """`incoming` is what `begin` returned: a path relative to the root. One task uses it at a time."""

    async def begin(self, owner: TenantId | None = None) -> str:
        """owner: whose it is to be; a store that seals needs it. Raises NotFound: no such tenant."""

    async def append(self, incoming: str, file_name: str, data: bytes) -> None:
        """Raises InvalidRequest: no such file name, or too large a chunk or file."""

    async def import_from(self, incoming: str, store_path: str) -> BroughtTokenizer:
        """From a folder inside the store. Raises InvalidRequest: none, or a file is missing, linked or too large."""

    async def copy_plain(self, incoming: str, digest: AdapterDigest) -> None:
        """The files of an object that lies in the clear. Raises InvalidRequest: there is none."""

    async def is_sealed(self, uid: AdapterUid) -> bool:
        """uid: of a tenant's adapter, with its owner."""

    async def put_rope(self, incoming: str, rope: str) -> None:
        """Into the configuration. Raises InvalidRequest where there is none."""

    async def finish(self, incoming: str) -> AdapterDigest:
        """Ends the writing. Raises InvalidRequest where a file is missing or the configuration is not JSON."""

    async def commit(self, incoming: str, digest: AdapterDigest) -> None:
        """Makes it the object `digest`. One that is there stays where its files are right, and else is replaced."""

    async def problem(self, uid: AdapterUid) -> str:
        """What is wrong with the object's files; empty: nothing. Reads them whole, unless it is cancelled.

        uid: of a tenant's adapter, with its owner.
        """

    async def discard(self, incoming: str) -> None:
        """One that is gone is fine."""

    async def sweep(self, *, now_unix_s: float, older_than_s: float) -> int:
        """Removes incoming folders of calls that died, by their age. Returns how many."""

    async def collect(self, referenced: Collection[AdapterUid], *, now_unix_s: float, older_than_s: float) -> list[str]:
        """Removes objects not in `referenced` (with owners) whose last commit is older. Returns what they were of.

        A plain object goes too once each of its tenants has it sealed.
        """


class LocalAdapterFiles:
    """Blocking work runs in threads; the folder is the state, so any number may share it. keys: None: it does not seal,
    and opens nothing sealed.
    """

    def __init__(
        self, root: Path, *, max_weights_bytes: int = DEFAULT_MAX_WEIGHTS_BYTES, keys: SealingKeys | None = None
    ) -> None:
        self._root = root
        self._limits = {CONFIG_NAME: MAX_CONFIG_BYTES, WEIGHTS_NAME: max_weights_bytes}
        self._keys = keys
        self._opening: OpeningKeys = keys or NoKeys()
        self._sealing: dict[str, FolderSealer] = {}  # by incoming

    async def begin(self, owner: TenantId | None = None) -> str:
        return await asyncio.to_thread(self._begin, owner)

    async def append(self, incoming: str, file_name: str, data: bytes) -> None:
        await asyncio.to_thread(self._append, incoming, file_name, data)

    async def import_from(self, incoming: str, store_path: str) -> BroughtTokenizer:
        return await asyncio.to_thread(self._import_from, incoming, store_path)

    async def copy_plain(self, incoming: str, digest: AdapterDigest) -> None:
        await asyncio.to_thread(self._copy_in, incoming, self._root / object_path(digest))

    async def is_sealed(self, uid: AdapterUid) -> bool:
        return await asyncio.to_thread(self.place_of, uid) == sealed_path(uid)

    async def put_rope(self, incoming: str, rope: str) -> None:
        await asyncio.to_thread(self._put_rope, incoming, rope)

    async def finish(self, incoming: str) -> AdapterDigest:
        return await asyncio.to_thread(self._finish, incoming)

    async def commit(self, incoming: str, digest: AdapterDigest) -> None:
        await asyncio.to_thread(self._commit, incoming, digest)

    async def problem(self, uid: AdapterUid) -> str:
        is_left = threading.Event()
        folder = self._root / self.place_of(uid)
        try:
            return await asyncio.to_thread(self._problem, folder, digest_of(uid), is_left)
        finally:
            is_left.set()
            for name in FILE_NAMES:
                forget_pages(folder / name)

    async def discard(self, incoming: str) -> None:
        await asyncio.to_thread(self._discard, incoming)

    async def sweep(self, *, now_unix_s: float, older_than_s: float) -> int:
        return await asyncio.to_thread(self._sweep, now_unix_s - older_than_s)

    async def collect(self, referenced: Collection[AdapterUid], *, now_unix_s: float, older_than_s: float) -> list[str]:
        return await asyncio.to_thread(self._collect, frozenset(referenced), now_unix_s - older_than_s)

    def place_of(self, uid: AdapterUid) -> str:
        """Where it is, sealed or plain."""
        is_sealed = owner_of(uid) is not None and (self._root / sealed_path(uid)).is_dir()
        return sealed_path(uid) if is_sealed else object_path(digest_of(uid))

    def owner_of(self, incoming: str) -> TenantId | None:
        """Of what is being sealed; None: it is not."""
        sealing = self._sealing.get(incoming)
        return TenantId(sealing.key.owner) if sealing is not None else None

    def open(self, path: Path, name: str) -> StoredFile:
        """Raises InvalidRequest, OSError, Sealed, ServiceUnavailable."""
        return stored_file(open_regular(path, field=name), name, self._opening)

    def _incoming(self, incoming: str) -> Path:
        head, _, name = incoming.partition("/")
        assert head == INCOMING, incoming
        assert name not in ("", ".", ".."), incoming
        assert "/" not in name, incoming
        return self._root / INCOMING / name

    def _begin(self, owner: TenantId | None) -> str:
        assert owner is not None or self._keys is None, "a store that seals needs to know for whom"
        key = self._keys.sealing(owner) if self._keys is not None and owner is not None else None
        (self._root / OBJECTS).mkdir(parents=True, exist_ok=True)
        (self._root / INCOMING).mkdir(exist_ok=True)
        incoming = f"{INCOMING}/{secrets.token_hex(16)}"
        (self._root / incoming).mkdir()
        if key is not None:
            self._sealing[incoming] = FolderSealer(key)
        return incoming

    def _append(self, incoming: str, file_name: str, data: bytes) -> None:
        folder, sealing = self._incoming(incoming), self._sealing.get(incoming)
        path = folder / file_name if file_name in FILE_NAMES else folder
        if sealing is not None:
            sealer = sealing.files.get(file_name)
            check_chunk(file_name, data, sealer.plain_bytes if sealer is not None else 0, self._limits)
            sealing.file(path).add(data)
            return
        size_bytes = path.stat().st_size if file_name in FILE_NAMES and path.exists() else 0
        check_chunk(file_name, data, size_bytes, self._limits)
        with path.open("ab") as file:
            file.write(data)

    def _import_from(self, incoming: str, store_path: str) -> BroughtTokenizer:
        source = resolve_inside(self._root, store_path, field="store_path")
        first = source.relative_to(self._root).parts[0]
        if first in OWN_FOLDERS:
            raise InvalidRequest.of("store_path", f"{first}/ belongs to the store itself")
        self._copy_in(incoming, source)
        return brought_by(source, follows_links=False)

    def _copy_in(self, incoming: str, source: Path) -> None:
        """An adapter's files. Raises InvalidRequest."""
        problems: list[FieldViolation] = []
        for name in FILE_NAMES:
            try:
                self._copy(source / name, incoming)
            except InvalidRequest as e:
                problems += e.violations
        if problems:
            raise InvalidRequest.of_all(problems)

    @contextmanager
    def writing(self, incoming: str, name: str) -> Iterator[Callable[[bytes], object]]:
        """A new file's writer."""
        path, sealing = self._incoming(incoming) / name, self._sealing.get(incoming)
        if sealing is not None:
            yield sealing.file(path).add
        else:
            with path.open("wb") as file:
                yield file.write

    def _copy(self, source: Path, incoming: str) -> None:
        limit_bytes = self._limits[source.name]
        with self.open(source, source.name) as reading, self.writing(incoming, source.name) as write:
            size_bytes = 0
            while block := reading.read(_COPY_BYTES):
                size_bytes += len(block)
                if size_bytes > limit_bytes:
                    raise InvalidRequest.of(source.name, f"has more than {limit_bytes} bytes")
                write(block)

    def _put_rope(self, incoming: str, rope: str) -> None:
        path, sealing = self._incoming(incoming) / CONFIG_NAME, self._sealing.get(incoming)
        if sealing is not None and CONFIG_NAME in sealing.files:
            sealing.files.pop(CONFIG_NAME).end()
        with self.open(path, CONFIG_NAME) as file:
            config = with_rope(parse_config(file.read(MAX_CONFIG_BYTES + 1)), rope)
        path.unlink()
        self._append(incoming, CONFIG_NAME, config)

    def _finish(self, incoming: str) -> AdapterDigest:
        folder, sealing = self._incoming(incoming), self._sealing.get(incoming)
        missing = [name for name in FILE_NAMES if not (folder / name).exists()]
        if missing:
            raise InvalidRequest.of_all([FieldViolation(name, "is missing") for name in missing])
        if sealing is not None:
            sealing.end()
        for name in FILE_NAMES:
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
            os.chmod(folder / name, 0o444)
        return self._digest(folder)

    def _digest(self, folder: Path, is_left: threading.Event | None = None) -> AdapterDigest:
        with self.open(folder / CONFIG_NAME, CONFIG_NAME) as file:
            hasher = content_hasher(parse_config(file.read(MAX_CONFIG_BYTES + 1)))
        with self.open(folder / WEIGHTS_NAME, WEIGHTS_NAME) as file:
            while (block := file.read(_COPY_BYTES)) and not (is_left is not None and is_left.is_set()):
                hasher.update(block)
        return AdapterDigest(hasher.hexdigest())

    def _commit(self, incoming: str, digest: AdapterDigest) -> None:
        # One file of weights is read, there or here, and the folder is synced: by its time nobody can tell whether
        # another tenant has the same.
        folder, owner = self._incoming(incoming), self.owner_of(incoming)
        target = self._root / (object_path(digest) if owner is None else sealed_path(adapter_uid(digest, owner)))
        for name in FILE_NAMES:
            forget_pages(folder / name)
        while True:
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError, NotADirectoryError):
                os.utime(target)  # its new time keeps `collect` away from it
                if not self._is_sound(target, folder, digest):
                    self._clear_unsound(target, folder, digest)
                    continue
                shutil.rmtree(folder, ignore_errors=True)
                break
            os.utime(folder)
            if not self._is_sound(folder, folder, digest):
                raise OSError(errno.EIO, "what was written is not what is read", str(folder))
            try:
                os.rename(folder, target)
            except OSError as e:
                if not os.path.lexists(target) and target.parent.exists():
                    raise e
                continue  # another call was faster with the same bytes
            break
        for name in FILE_NAMES:
            forget_pages(target / name)
        with _folder_descriptor(target.parent) as descriptor:
            os.fsync(descriptor)

    def _clear_unsound(self, target: Path, folder: Path, digest: AdapterDigest) -> None:
        """Moves it away whole. Until the sound one is there readers find none, as they could not use this one."""
        trash = self._root / INCOMING / f"{_TRASH}{secrets.token_hex(16)}"
        with _folder_descriptor(target.parent) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not self._is_sound(target, folder, digest):  # another call may have replaced it meanwhile
                _LOG.warning("a damaged object is replaced", extra=fields(adapter=digest))
                os.rename(target, trash)
        _remove(trash)

    def _is_sound(self, target: Path, folder: Path, digest: AdapterDigest) -> bool:
        """Whether it holds what `folder` holds, the object `digest`. Raises FileNotFoundError where it is gone."""
        if not stat.S_ISDIR(os.lstat(target).st_mode):
            return False
        try:
            with (
                self.open(target / WEIGHTS_NAME, WEIGHTS_NAME) as there,
                self.open(folder / WEIGHTS_NAME, WEIGHTS_NAME) as here,
            ):
                if there.plain_bytes != here.plain_bytes:
                    return False
            return self._digest(target) == digest
        except (InvalidRequest, DataLost, PermissionError, Sealed):
            return False

    def _problem(self, folder: Path, digest: AdapterDigest, is_left: threading.Event) -> str:
        try:
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                return f"{folder.relative_to(self._root)} is no folder"
            found = self._digest(folder, is_left)
        except (InvalidRequest, DataLost, Sealed) as e:
            return e.message
        except OSError as e:
            return f"{Path(e.filename or folder).name}: cannot be read: {os.strerror(e.errno or 0)}"
        if found == digest:
            return ""
        return f"{CONFIG_NAME} and {WEIGHTS_NAME} are not what was registered: their digest is {found}"

    def _discard(self, incoming: str) -> None:
        sealing = self._sealing.pop(incoming, None)
        if sealing is not None:
            sealing.discard()
        shutil.rmtree(self._incoming(incoming), ignore_errors=True)

    def _sweep(self, before_unix_s: float) -> int:
        removed = 0
        for folder in self._folders(INCOMING):
            with suppress(FileNotFoundError):
                newest = max(p.stat().st_mtime for p in [folder, *folder.iterdir()])
                if newest < before_unix_s:
                    shutil.rmtree(folder, ignore_errors=True)
                    removed += 1
        return removed

    def _collect(self, referenced: frozenset[AdapterUid], before_unix_s: float) -> list[str]:
        plain = {digest_of(uid) for uid in referenced if self.place_of(uid) == object_path(digest_of(uid))}
        unused: list[tuple[str, Path]] = []
        for folder in self._folders(OBJECTS):
            if is_digest(folder.name) and folder.name not in plain:
                unused.append((folder.name, folder))
        for parent in self._folders(SEALED):
            for folder in self._folders(f"{SEALED}/{parent.name}"):
                uid = f"{parent.name}@{folder.name}"
                if is_uid(uid) and uid not in referenced:
                    unused.append((uid, folder))
        return [name for name, folder in unused if self._remove_old(folder, before_unix_s)]

    def _remove_old(self, folder: Path, before_unix_s: float) -> bool:
        with suppress(FileNotFoundError):
            if folder.stat().st_mtime >= before_unix_s:
                return False
            # Moved away first: a commit of the same bytes either refreshed the time before the move, which is
            # seen here and undone, or finds no object and brings its own.
            trash = self._root / INCOMING / f"{_TRASH}{secrets.token_hex(16)}"
            trash.parent.mkdir(exist_ok=True)
            os.rename(folder, trash)
            if trash.stat().st_mtime >= before_unix_s and not folder.exists():
                os.rename(trash, folder)
                return False
            shutil.rmtree(trash, ignore_errors=True)
            if folder.parent.name != OBJECTS:
                with suppress(OSError):  # another tenant has the same adapter
                    folder.parent.rmdir()
            return True
        return False

    def _folders(self, name: str) -> list[Path]:
        parent = self._root / name
        return sorted(p for p in parent.iterdir() if not p.is_symlink() and p.is_dir()) if parent.is_dir() else []


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def forget_pages(path: Path) -> None:
    """So that the next read is of the disk, whoever has read the file before."""
    with suppress(OSError, InvalidRequest):  # whoever reads it is told what is wrong with it
        descriptor = open_regular(path, field=path.name)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def _folder_descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
