"""`manylora up`, and what it can be told; `cluster` does it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from manylora_shared.dialects import ReasoningParser, ToolParser

from manylora.cli.output import HTTP_PORT_STEP, run

if TYPE_CHECKING:
    from manylora.local.cluster import ClusterOptions

DEFAULT_PORT = 7070


class KvCacheDtype(enum.StrEnum):
    AUTO = "auto"
    FP8 = "fp8"


KvCacheDtypeOption = Annotated[KvCacheDtype, typer.Option(help="Of keys and values; auto: the model's.")]


class Quantization(enum.StrEnum):
    NONE = "none"
    NF4 = "nf4"
    FP8 = "fp8"
    INT4 = "int4"


class GenerationConfig(enum.StrEnum):
    AUTO = "auto"
    NONE = "none"


Tenants = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, readable=True, help="YAML documents to apply at the start."),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the first router; 0 picks a free one.")]
MaxLoraRank = Annotated[
    int | None, typer.Option(min=1, help="Greatest rank of an adapter; default: the worker's choice.")
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(min=1, help="Longest context, of adapters that stretch the model's, too; default: the model's."),
]
DraftModel = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="A small model with the same tokens, which guesses for classes whose policy says `speculation: draft`.",
    ),
]
ModelAliases = Annotated[
    list[str] | None,
    typer.Option(help="A further name under which adapters may know the model; may be repeated."),
]
GenerationConfigOption = Annotated[
    GenerationConfig,
    typer.Option(help="Sampling where a request sets none: the model's generation_config.json's, or nobody's."),
]
ToolParserOption = Annotated[
    ToolParser, typer.Option(help="How the model's answers call tools; auto: by its chat template.")
]
ReasoningParserOption = Annotated[
    ReasoningParser, typer.Option(help="How they set reasoning apart; auto: by its chat template.")
]
ModelOption = Annotated[
    str, typer.Option(help="Folder of a Hugging Face model, or its cached hub id; `demo` comes along.")
]
Data = Annotated[
    Path, typer.Option(file_okay=False, help="Folder of the cluster's state: etcd, adapters, usage, logs.")
]
Pools = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=MODEL",
        help="A further pool, of another model, with as many workers; tenants whose policies name it may use it. "
        "May be repeated.",
    ),
]
Schedulers = Annotated[int, typer.Option(min=1, max=8, help="One leads, the others stand by.")]
KvCacheMb = Annotated[
    int | None, typer.Option(min=1, help="Memory for keys and values, a worker; default: the worker's choice.")
]
WithTls = Annotated[
    bool, typer.Option("--tls", help="TLS on every port, by an authority made in the data folder (tls/ca.pem).")
]
SequenceSlots = Annotated[
    int | None,
    typer.Option(min=1, max=512, help="Sequences that run together, a worker; default: the worker's choice."),
]
DeviceAdapterMb = Annotated[
    int | None, typer.Option(min=1, help="Memory for adapters on the device, a worker; default: the worker's choice.")
]
HostAdapterMb = Annotated[
    int | None, typer.Option(min=1, help="Memory for adapters on the host, a worker; default: the worker's choice.")
]
AdapterCacheMb = Annotated[
    int | None, typer.Option(min=1, help="Disk for adapters of a store in a bucket; default: the worker's choice.")
]
Devices = Annotated[
    str,
    typer.Option(
        help="Device of the workers, e.g. cpu or cuda; several (cuda:0,cuda:1) are dealt in turn; "
        "auto: cuda where torch sees one."
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(min=1, help="GPUs that share the model, a worker; --device cuda:0,cuda:2 says the first of each."),
]
ComputeType = Annotated[
    str, typer.Option(help="Compute type of the workers; default: float32 on the CPU, bfloat16 elsewhere.")
]
AdapterStore = Annotated[str, typer.Option(help="Instead of a folder in --data: s3://BUCKET/PREFIX.")]
AdapterStoreAccess = Annotated[
    str, typer.Option(help="YAML file with its endpoint, region and credentials; else AWS_* of the environment.")
]
AdapterSources = Annotated[
    str, typer.Option(help="YAML file of the places that tenants may name as sources of adapters.")
]
Encryption = Annotated[
    str,
    typer.Option(
        help="Seal what is stored of tenants: local (keys in --data), local:FILE, aws-kms:ARN or vault:URL#KEY; "
        "default: nothing is sealed. MANYLORA_ENCRYPTION_ACCESS names the YAML file of what the service asks for."
    ),
]
Ledger = Annotated[
    str,
    typer.Option(
        metavar="PLACE",
        help="Where usage is kept: sqlite:FILE, parquet:FOLDER, postgresql:env:NAME (or file:PATH, vault:PATH#FIELD); "
        "none; default: usage.sqlite in --data.",
    ),
]
Prices = Annotated[str, typer.Option(metavar="FILE", help="YAML file of the price list; default: rows have no price.")]
DrainS = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds that running requests may go on at the end; default: the worker's choice."),
]


def _http_port(port: int) -> int:
    return port + HTTP_PORT_STEP if 0 < port <= 65535 - HTTP_PORT_STEP else 0


HttpPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the first router's OpenAI HTTP API; 0 picks a free one; default: 10 above --port.",
    ),
]


def up(
    model: ModelOption,
    tenants: Tenants = None,
    pool: Pools = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Of each pool.")] = 1,
    routers: Annotated[int, typer.Option(min=1, max=64)] = 1,
    schedulers: Schedulers = 1,
    tls: WithTls = False,
    device: Devices = "auto",
    port: Port = DEFAULT_PORT,
    http_port: HttpPort = None,
    data: Data = Path("manylora-data"),
    etcd: Annotated[str, typer.Option(metavar="URL", help="An etcd that runs already; otherwise one is started.")] = "",
    model_name: Annotated[str, typer.Option(help="The model's name; default: the last part of --model.")] = "",
    model_alias: ModelAliases = None,
    dtype: ComputeType = "",
    quantization: Annotated[Quantization, typer.Option(help="Of the base model's weights.")] = Quantization.NONE,
    kv_cache_mb: KvCacheMb = None,
    kv_cache_dtype: KvCacheDtypeOption = KvCacheDtype.AUTO,
    max_lora_rank: MaxLoraRank = None,
    max_model_len: MaxModelLen = None,
    draft_model: DraftModel = "",
    generation_config: GenerationConfigOption = GenerationConfig.AUTO,
    tool_parser: ToolParserOption = "auto",
    reasoning_parser: ReasoningParserOption = "auto",
    sequence_slots: SequenceSlots = None,
    device_adapter_mb: DeviceAdapterMb = None,
    host_adapter_mb: HostAdapterMb = None,
    adapter_cache_mb: AdapterCacheMb = None,
    tensor_parallel: TensorParallel = 1,
    adapter_store: AdapterStore = "",
    adapter_store_access: AdapterStoreAccess = "",
    adapter_sources: AdapterSources = "",
    encryption: Encryption = "",
    ledger: Ledger = "",
    prices: Prices = "",
    drain_s: DrainS = None,
) -> None:
    """Run a local cluster in the foreground; prints one JSON line when it serves."""
    options = _options(locals())
    from manylora.cli import cluster

    run(cluster.up(options, tenants), as_json=False)


def _options(given: Mapping[str, Any]) -> ClusterOptions:
    """Those of `up`, by their names."""
    from manylora.cli import cluster
    from manylora.local.cluster import ClusterOptions

    names = {field.name for field in dataclasses.fields(ClusterOptions)} & given.keys()
    options = {name: given[name].value if isinstance(given[name], enum.Enum) else given[name] for name in names}
    port, http_port = given["port"], given["http_port"]
    options |= {
        "model": cluster.model_source(given["model"]),
        "draft_model": cluster.model_source(given["draft_model"], "--draft-model") if given["draft_model"] else "",
        "model_name": given["model_name"] or cluster.name_of(given["model"]),
        "model_aliases": tuple(given["model_alias"] or ()),
        "pools": cluster.pools_of(given["pool"] or []),
        "http_port": http_port if http_port is not None else _http_port(port),
    }
    return ClusterOptions(**options)
