"""`python -m manylora_router`: a RouterApp over gRPC, etcd and the file system, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import shutil
import sys
from pathlib import Path
from tempfile import mkdtemp

import manylora_shared.transport.grpc_polling  # noqa: F401  before anything imports grpc
from manylora.v1 import worker_pb2
from manylora_shared.audit.log import AuditLog
from manylora_shared.audit.sealing import EntrySeal
from manylora_shared.audit.signing import signer_of
from manylora_shared.encryption.names import NameSeal
from manylora_shared.encryption.sealing import SealingKeys
from manylora_shared.metadata import PEER_KEY
from manylora_shared.process import loop as service_loop
from manylora_shared.process.clock import SystemClock
from manylora_shared.process.config import load
from manylora_shared.process.heap import collect_less
from manylora_shared.process.last_resort import LastResort
from manylora_shared.process.main import Parts, serve
from manylora_shared.stores.access import access_of
from manylora_shared.stores.adapter_files import AdapterFiles, LocalAdapterFiles
from manylora_shared.stores.bucket import Bucket, is_bucket
from manylora_shared.stores.bucket_files import BucketAdapterFiles
from manylora_shared.stores.documents import BucketDocuments, Documents, LocalDocuments
from manylora_shared.stores.model_files import model_folder
from manylora_shared.telemetry import logs
from manylora_shared.transport.bundles.client import BundlingTransport

from manylora_router.admin.sources import Sources, read_rules
from manylora_router.app import RouterApp
from manylora_router.config import RouterConfig
from manylora_router.ledger.opening import ledger_of
from manylora_router.text.service import HfTextService, TextService, TokenIdsOnlyText, has_tokenizer

_LOG = logging.getLogger("manylora_router")

# prompts that are tokenized at a time: the tokenizer leaves the interpreter, and the event loop needs a core too
_TOKENIZER_THREADS = 2
_ACCEPTORS = 32  # tenants call from connections of their own: the burst of one waits behind itself


def load_text(model: str) -> TextService:
    if not model:
        return TokenIdsOnlyText()
    # The router does without torch; where it is installed, transformers would import it, for seconds and memory.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    folder = model_folder(model)
    if not has_tokenizer(folder):
        _LOG.warning("%s: has no tokenizer; requests must give token ids, and answers have no text", folder)
        return TokenIdsOnlyText()
    return HfTextService.load(folder, threads=_TOKENIZER_THREADS)


def _adapter_store(config: RouterConfig, keys: SealingKeys | None) -> tuple[AdapterFiles, Documents]:
    """Raises ValueError, OSError."""
    limit = config.max_adapter_mb << 20
    if not is_bucket(config.adapter_store):
        root = Path(config.adapter_store)
        return LocalAdapterFiles(root, max_weights_bytes=limit, keys=keys), LocalDocuments(root, keys=keys)
    staging = Path(mkdtemp(prefix="manylora-router-"))
    atexit.register(shutil.rmtree, staging, ignore_errors=True)
    bucket = Bucket(config.adapter_store, access_of(config.adapter_store_access))
    files = BucketAdapterFiles(bucket, staging, max_weights_bytes=limit, keys=keys)
    return files, BucketDocuments(bucket, keys=keys)


def _audit_log(config: RouterConfig, parts: Parts, keys: SealingKeys | None) -> AuditLog | None:
    """Raises OSError, ValueError."""
    if not config.audit_log:
        _LOG.warning("no audit log is kept: --audit-log says where")
        return None
    folder = Path(config.audit_log)
    key_file = Path(config.audit_key_file) if config.audit_key_file else folder.parent / "audit.key"
    return AuditLog(
        folder,
        signer_of(key_file, parts.rng.getrandbits),
        parts.store,
        now_unix_s=SystemClock().now_unix_s,
        getrandbits=parts.rng.getrandbits,
        seal=EntrySeal(NameSeal(keys)),
    )


async def build(config: RouterConfig, parts: Parts) -> RouterApp:
    text = await asyncio.to_thread(load_text, config.model)
    keyring = config.keyring()
    files, documents = _adapter_store(config, keyring)
    return RouterApp(
        config,
        transport=BundlingTransport(
            parts.transport, [worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]], line_keys=[PEER_KEY]
        ),
        store=parts.store,
        text=text,
        pool_texts={pool: functools.partial(load_text, model) for pool, model in config.models_of_pools.items()},
        adapter_store=files,
        documents=documents,
        keyring=keyring,
        sources=Sources(read_rules(config.adapter_sources), max_weights_bytes=config.max_adapter_mb << 20),
        telemetry=parts.telemetry,
        rng=parts.rng,
        peer_secret=parts.peer_secret,
        tls=parts.tls,
        audit=_audit_log(config, parts, keyring),
        open_ledger=ledger_of(
            config.ledger,
            config.ledger_log,
            config.prices,
            max_mb=config.ledger_max_mb,
            when_full=config.ledger_when_full,
            keys=keyring,
            via=config.ledger_via,
            getrandbits=parts.rng.getrandbits,
        ),
    )


def main() -> None:
    config = load(RouterConfig)
    logs.setup("router", config.log_level, instance_id=config.router_id)
    collect_less()
    try:
        was_told = service_loop.run(
            serve(
                "router",
                config,
                functools.partial(build, config),
                instance_id=config.router_id,
                acceptors=_ACCEPTORS,
                asks_clients=False,
                last_resort=LastResort(),
            )
        )
    except (OSError, ValueError) as e:
        _LOG.error("the router cannot run: %s", e)
        sys.exit(1)
    sys.exit(0 if was_told else 1)


if __name__ == "__main__":
    main()
