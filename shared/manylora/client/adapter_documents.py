"""Reports, samples and files of adapters, as a part of Client.adapters."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from manylora_shared.errors import Code, RpcError
from manylora_shared.stores.adapter_files import FILE_NAMES, MAX_CHUNK_BYTES, adapter_digest, parse_config
from manylora_shared.transport.base import methods_of

from manylora.client.adapter_lines import AdapterLines
from manylora.client.answers import RequestFailed
from manylora.client.caller import DEFAULT_TIMEOUT_S
from manylora.client.cluster import AdapterInfo, CheckedAdapter, SamplesInfo
from manylora.client.folder import AdapterFolder
from manylora.client.messages import adapter_from, samples_from
from manylora.v1 import admin_pb2

_ADMIN = methods_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"])
ADD_TIMEOUT_S = 900.0  # the quality gate's longest, and what comes before it
SAMPLES_NAME = "samples.jsonl"
STORE_PREFIX = "store:"


class AdapterDocuments(AdapterLines):
    async def check(
        self,
        tenant_id: str,
        source: Path | str,
        *,
        name: str = "",
        samples: bytes = b"",
        judge: str = "",
        rope: str = "",
        timeout_s: float = ADD_TIMEOUT_S,
    ) -> CheckedAdapter:
        """As `add`, and registers nothing; what is wrong with the adapter stands in the report.

        Args:
            source: a PEFT folder; `store:PATH`; or an address that a router reads.
            name: of the adapter whose version in force it is compared with; empty: none.
            samples: JSON lines; empty: those of the tenant's policy, if it has any.
            judge: of these samples; empty: the policy's, or exact.
            rope: as of `add`.
        """
        header = admin_pb2.AddAdapterHeader(tenant_id=tenant_id, name=name, judge=judge, rope=rope)
        folder = _set_source(header, source)
        parts = _check_parts(header, folder, samples)
        answer = await self._caller.upload(_ADMIN["CheckAdapter"], parts, timeout_s=timeout_s)
        return CheckedAdapter(passed=answer.passed, report=json.loads(answer.report))

    async def report(
        self, tenant_id: str, name: str, number: int = 0, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[AdapterInfo, dict[str, Any]]:
        """number: 0 is the newest version."""
        request = admin_pb2.GetAdapterReportRequest(tenant_id=tenant_id, name=name, number=number)
        answer = await self._caller.call(_ADMIN["GetAdapterReport"], request, timeout_s=timeout_s)
        return adapter_from(answer.adapter), json.loads(answer.report)

    async def read(
        self, tenant_id: str, name: str, folder: Path, number: int = 0, *, timeout_s: float | None = None
    ) -> AdapterInfo:
        """Writes a version's files into the folder, which is there. number: 0 is the version in force.

        Raises RequestFailed, also with DATA_LOSS where they are not what was registered.
        """
        info: AdapterInfo | None = None
        opened = {name: (folder / name).open("wb") for name in FILE_NAMES}
        try:
            async for answer in self._read(tenant_id, name, number, timeout_s):
                info = adapter_from(answer.adapter) if answer.HasField("adapter") else info
                if answer.HasField("chunk"):
                    opened[answer.chunk.file_name].write(answer.chunk.data)
        finally:
            for file in opened.values():
                file.close()
        config, weights = (folder / name for name in FILE_NAMES)
        if info is None or adapter_digest(parse_config(config.read_bytes()), weights) != info.version:
            raise RequestFailed(Code.DATA_LOSS.name, "the files are not what was registered: their digest is another")
        return info

    async def _read(
        self, tenant_id: str, name: str, number: int, timeout_s: float | None
    ) -> AsyncIterator[admin_pb2.ReadAdapterResponse]:
        self._caller.check_open()
        request = admin_pb2.ReadAdapterRequest(tenant_id=tenant_id, name=name, number=number)
        stream = self._caller.stream(_ADMIN["ReadAdapter"], request, timeout_s=timeout_s)
        try:
            while (answer := await stream.read()) is not None:
                yield answer
        except RpcError as error:
            raise self._caller.failed(error) from None
        finally:
            stream.cancel()

    async def put_samples(
        self, tenant_id: str, name: str, samples: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> SamplesInfo:
        """Replaces what stands under the name."""
        request = admin_pb2.PutSamplesRequest(tenant_id=tenant_id, name=name, samples=samples)
        return samples_from((await self._caller.call(_ADMIN["PutSamples"], request, timeout_s=timeout_s)).samples)

    async def list_samples(self, tenant_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[SamplesInfo, ...]:
        request = admin_pb2.ListSamplesRequest(tenant_id=tenant_id)
        answer = await self._caller.call(_ADMIN["ListSamples"], request, timeout_s=timeout_s)
        return tuple(samples_from(each) for each in answer.samples)

    async def remove_samples(self, tenant_id: str, name: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        request = admin_pb2.RemoveSamplesRequest(tenant_id=tenant_id, name=name)
        await self._caller.call(_ADMIN["RemoveSamples"], request, timeout_s=timeout_s, repeatable=False)


def _set_source(header: admin_pb2.AddAdapterHeader, source: Path | str) -> AdapterFolder | None:
    if isinstance(source, str) and source.startswith(STORE_PREFIX):
        header.store_path = source.removeprefix(STORE_PREFIX)
        return None
    if isinstance(source, str) and "://" in source:
        header.source = source
        return None
    folder = AdapterFolder.open(Path(source))
    header.chat_template = folder.tokenizer.chat_template
    header.added_tokens.update(folder.tokenizer.added_tokens)
    header.rope = header.rope or folder.tokenizer.rope
    return folder


def _check_parts(
    header: admin_pb2.AddAdapterHeader, folder: AdapterFolder | None, samples: bytes
) -> Iterator[admin_pb2.CheckAdapterRequest]:
    yield admin_pb2.CheckAdapterRequest(header=header)
    for name, data in folder.chunks() if folder is not None else ():
        yield admin_pb2.CheckAdapterRequest(chunk=admin_pb2.FileChunk(file_name=name, data=data))
    for first in range(0, len(samples), MAX_CHUNK_BYTES):
        data = samples[first : first + MAX_CHUNK_BYTES]
        yield admin_pb2.CheckAdapterRequest(chunk=admin_pb2.FileChunk(file_name=SAMPLES_NAME, data=data))
