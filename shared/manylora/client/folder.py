"""A PEFT adapter's folder on this machine, cut into upload chunks. Links are followed: they are the caller's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from manylora_shared.errors import FieldViolation, InvalidRequest
from manylora_shared.stores.adapter_files import FILE_NAMES, MAX_CHUNK_BYTES, open_regular
from manylora_shared.stores.adapter_tokenizer import BroughtTokenizer, brought_by

from manylora.client.answers import RequestFailed
from manylora.v1 import admin_pb2


@dataclass(frozen=True)
class AdapterFolder:
    path: Path
    size_bytes: int
    tokenizer: BroughtTokenizer

    @classmethod
    def open(cls, path: Path) -> AdapterFolder:
        """Raises RequestFailed with INVALID_ARGUMENT and every reason, as the server would."""
        if not path.is_dir():
            raise _refusal([FieldViolation("path", f"{path} is not a folder")])
        size_bytes = 0
        violations: list[FieldViolation] = []
        for name in FILE_NAMES:
            try:
                descriptor = open_regular(path / name, field=name, follows_links=True)
            except InvalidRequest as error:
                violations += error.violations
                continue
            size_bytes += os.fstat(descriptor).st_size
            os.close(descriptor)
        tokenizer = BroughtTokenizer()
        try:
            tokenizer = brought_by(path, follows_links=True)
        except InvalidRequest as error:
            violations += error.violations
        if violations:
            raise _refusal(violations)
        return cls(path, size_bytes, tokenizer)

    def chunks(self) -> Iterator[tuple[str, bytes]]:
        """(file name, its next bytes), at most 1 MiB each; an empty file gives one empty chunk."""
        for name in FILE_NAMES:
            with open(open_regular(self.path / name, field=name, follows_links=True), "rb") as file:
                data = file.read(MAX_CHUNK_BYTES)
                yield name, data
                while data := file.read(MAX_CHUNK_BYTES):
                    yield name, data


def upload_parts(
    header: admin_pb2.AddAdapterHeader, folder: AdapterFolder | None
) -> Iterator[tuple[admin_pb2.AddAdapterRequest, int]]:
    """The messages of an upload, each with the file bytes sent once it is through."""
    yield admin_pb2.AddAdapterRequest(header=header), 0
    sent_bytes = 0
    for name, data in folder.chunks() if folder is not None else ():
        sent_bytes += len(data)
        yield admin_pb2.AddAdapterRequest(chunk=admin_pb2.FileChunk(file_name=name, data=data)), sent_bytes


def _refusal(violations: list[FieldViolation]) -> RequestFailed:
    message = InvalidRequest.of_all(violations).message
    return RequestFailed(InvalidRequest.code.name, message, violations=violations)
