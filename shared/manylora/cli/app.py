"""The commands and their options, and nothing of what they do: each hands over to its module when it runs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from manylora.cli.output import run, usage_error

DEFAULT_SERVER = "127.0.0.1:7070"
DEFAULT_PORT = 7070
MAX_TOKEN_ID = 2**32 - 1

app = typer.Typer(
    help="Many tenants' LoRA adapters on one shared base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
tenant_app = typer.Typer(help="Tenants and their policies.", no_args_is_help=True)
adapter_app = typer.Typer(help="Adapters in tenants' namespaces.", no_args_is_help=True)
app.add_typer(tenant_app, name="tenant")
app.add_typer(adapter_app, name="adapter")


class ServiceClass(enum.StrEnum):
    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class Quantization(enum.StrEnum):
    NONE = "none"
    NF4 = "nf4"


Server = Annotated[str, typer.Option(envvar="MANYLORA_SERVER", metavar="HOST:PORT", help="The router to talk to.")]
Json = Annotated[bool, typer.Option("--json", help="The result as one JSON document on stdout.")]
Tenant = Annotated[str, typer.Option("--tenant", help="The tenant.")]


@app.command()
def up(
    model: Annotated[
        str, typer.Option(help="Folder of a Hugging Face model, or its cached hub id; `demo` comes along.")
    ],
    tenants: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, readable=True, help="YAML documents to apply at the start."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64)] = 1,
    routers: Annotated[int, typer.Option(min=1, max=64)] = 1,
    device: Annotated[
        str, typer.Option(help="Device of the workers, e.g. cpu or cuda; several (cuda:0,cuda:1) are dealt in turn.")
    ] = "cpu",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the first router; 0 picks a free one.")
    ] = DEFAULT_PORT,
    data: Annotated[
        Path, typer.Option(file_okay=False, help="Folder of the cluster's state: etcd, adapters, logs.")
    ] = Path("manylora-data"),
    etcd: Annotated[str, typer.Option(metavar="URL", help="An etcd that runs already; otherwise one is started.")] = "",
    model_name: Annotated[str, typer.Option(help="The model's name; default: the last part of --model.")] = "",
    dtype: Annotated[
        str, typer.Option(help="Compute type of the workers; default: float32 on the CPU, bfloat16 elsewhere.")
    ] = "",
    quantization: Annotated[Quantization, typer.Option(help="Of the base model's weights.")] = Quantization.NONE,
    kv_cache_mb: Annotated[
        int | None, typer.Option(min=1, help="Memory for keys and values, a worker; default: the worker's choice.")
    ] = None,
    max_lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Greatest rank of an adapter; default: the worker's choice.")
    ] = None,
) -> None:
    """Run a local cluster in the foreground; prints one JSON line when it serves."""
    from manylora.cli import cluster
    from manylora.local_cluster import ClusterOptions

    options = ClusterOptions(
        model=cluster.model_source(model),
        model_name=model_name or cluster.name_of(model),
        data=data,
        workers=workers,
        routers=routers,
        device=device,
        port=port,
        etcd=etcd,
        dtype=dtype,
        quantization=quantization.value,
        kv_cache_mb=kv_cache_mb,
        max_lora_rank=max_lora_rank,
    )
    run(cluster.up(options, tenants), as_json=False)


@app.command()
def demo(as_json: Json = False) -> None:
    """Four tenants stream from their own adapters of a small trained model; every answer is checked."""
    from manylora.cli import cluster

    run(cluster.demo(as_json=as_json), as_json=as_json)


@app.command()
def generate(
    tenant: Tenant,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; `-` reads it from stdin.")] = None,
    adapter: Annotated[str, typer.Option(help="The adapter's name; without one the base model answers.")] = "",
    qos_class: Annotated[
        ServiceClass | None, typer.Option("--class", help="Service class; default: the router's.")
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="The prompt as token ids instead of text.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=0, max=MAX_TOKEN_ID, help="0: the router's default.")] = 0,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Stream one continuation. With --json it streams to stderr and ends with one object on stdout."""
    if (prompt is None) == (token_ids is None):
        raise usage_error("give either a PROMPT or --token-ids")
    from manylora.cli import generation

    run(
        generation.generate(
            server,
            generation.read_prompt(prompt) if prompt is not None else _token_ids(token_ids or ""),
            tenant=tenant,
            adapter=adapter,
            qos_class=qos_class.value if qos_class else "",
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop=stop or [],
            as_json=as_json,
        ),
        as_json=as_json,
    )


@tenant_app.command("apply")
def tenant_apply(
    file: Annotated[Path, typer.Argument(help="YAML, one policy a document; `-` reads stdin.", allow_dash=True)],
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Create or replace tenants from policy documents, in their order; stops at the first that is refused."""
    from manylora.cli import tenants

    run(tenants.apply(server, file, as_json=as_json), as_json=as_json)


@tenant_app.command("get")
def tenant_get(
    tenant_id: Annotated[str, typer.Argument(metavar="TENANT")], as_json: Json = False, server: Server = DEFAULT_SERVER
) -> None:
    """Print a tenant's policy."""
    from manylora.cli import tenants

    run(tenants.get(server, tenant_id, as_json=as_json), as_json=as_json)


@tenant_app.command("list")
def tenant_list(as_json: Json = False, server: Server = DEFAULT_SERVER) -> None:
    """List all tenants."""
    from manylora.cli import tenants

    run(tenants.list_all(server, as_json=as_json), as_json=as_json)


@tenant_app.command("delete")
def tenant_delete(
    tenant_id: Annotated[str, typer.Argument(metavar="TENANT")], as_json: Json = False, server: Server = DEFAULT_SERVER
) -> None:
    """Remove a tenant and its adapters."""
    from manylora.cli import tenants

    run(tenants.delete(server, tenant_id, as_json=as_json), as_json=as_json)


@adapter_app.command("add")
def adapter_add(
    name: Annotated[str, typer.Argument(help="Its name in the tenant's namespace.")],
    path: Annotated[
        str, typer.Argument(help="A PEFT folder, or `store:PATH` for one inside the cluster's adapter store.")
    ],
    tenant: Tenant,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Upload, check and register an adapter."""
    from manylora.cli import adapters

    run(adapters.add(server, tenant, name, path, as_json=as_json), as_json=as_json)


@adapter_app.command("list")
def adapter_list(
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """List adapters."""
    from manylora.cli import adapters

    run(adapters.list_all(server, tenant, as_json=as_json), as_json=as_json)


@adapter_app.command("remove")
def adapter_remove(
    name: Annotated[str, typer.Argument()], tenant: Tenant, as_json: Json = False, server: Server = DEFAULT_SERVER
) -> None:
    """Remove an adapter's name; requests in flight end as they would have."""
    from manylora.cli import adapters

    run(adapters.remove(server, tenant, name, as_json=as_json), as_json=as_json)


@app.command()
def status(as_json: Json = False, server: Server = DEFAULT_SERVER) -> None:
    """Show the cluster: workers, routers, scheduler, flows."""
    from manylora.cli import overview

    run(overview.show(server, as_json=as_json), as_json=as_json)


def _token_ids(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    for word in words:
        if not (word.isascii() and word.isdigit()) or int(word) > MAX_TOKEN_ID:
            raise usage_error(f"--token-ids: {word!r} is not a token id")
    return [int(word) for word in words]
