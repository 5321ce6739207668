"""`python -m manylora_router`: a RouterApp over gRPC, etcd and the file system, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import signal
import sys
from pathlib import Path

from manylora_shared import logs
from manylora_shared.adapter_files import LocalAdapterFiles
from manylora_shared.config import is_loopback, load
from manylora_shared.coordination.etcd import EtcdStore
from manylora_shared.heap import freeze_started
from manylora_shared.telemetry import Telemetry
from manylora_shared.transport.grpc_transport import GrpcTransport

from manylora_router.app import RouterApp
from manylora_router.config import RouterConfig
from manylora_router.text_service import HfTextService, TextService, TokenIdsOnlyText, has_tokenizer

_LOG = logging.getLogger("manylora_router")


def load_text(config: RouterConfig) -> TextService:
    if not config.model:
        return TokenIdsOnlyText()
    # The router does without torch; where it is installed, transformers would import it, for seconds and memory.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    folder = Path(config.model)
    if folder.is_dir() and not has_tokenizer(folder):
        _LOG.warning("%s: has no tokenizer; requests must give token ids, and answers have no text", folder)
        return TokenIdsOnlyText()
    return HfTextService.load(folder, threads=config.tokenizer_threads)


async def run(config: RouterConfig) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    rng = random.SystemRandom()
    text = await asyncio.to_thread(load_text, config)
    files = LocalAdapterFiles(Path(config.adapter_store), max_weights_bytes=config.max_adapter_mb << 20)
    store = EtcdStore(config.etcd.split(","))
    telemetry = Telemetry(
        "router", instance_id=config.router_id, otlp_endpoint=config.otlp_endpoint, trace_file=config.trace_file
    )
    app = RouterApp(
        config,
        transport=GrpcTransport(),
        store=store,
        text=text,
        adapter_store=files,
        telemetry=telemetry,
        rng=rng,
    )
    stop_wanted = asyncio.create_task(stopping.wait(), name="stop signal")
    try:
        starting = asyncio.create_task(app.start(), name="start")
        await asyncio.wait([starting, stop_wanted], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            freeze_started()
            ready = {"ready": True, "service": "router", "id": app.router_id, "address": app.address}
            print(json.dumps(ready), flush=True)
            failing = asyncio.create_task(app.failed(), name="failure")
            await asyncio.wait([failing, stop_wanted], return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                failing.result()
            failing.cancel()
        else:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
    finally:
        stop_wanted.cancel()
        await app.stop()
        await store.close()
        await asyncio.to_thread(telemetry.shutdown)


def main() -> None:
    config = load(RouterConfig)
    logs.setup("router", config.log_level, instance_id=config.router_id)
    if not is_loopback(config.listen):
        _LOG.warning("--insecure: %s can be reached by others and callers are not authenticated", config.listen)
    try:
        asyncio.run(run(config))
    except (OSError, ValueError) as e:
        _LOG.error("the router cannot run: %s", e)
        sys.exit(1)


if __name__ == "__main__":
    main()
