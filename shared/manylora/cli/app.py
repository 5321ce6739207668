"""The commands and their options, and nothing of what they do: each hands over to its module when it runs."""

from __future__ import annotations

import enum
import importlib.metadata
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from manylora_shared.constraints.constraint import Constraint
from manylora_shared.sampling import Sampling

from manylora.cli.commands.adapter_commands import adapter_app
from manylora.cli.commands.audit_commands import audit_app
from manylora.cli.commands.encryption_commands import encryption_app
from manylora.cli.commands.key_commands import key_app
from manylora.cli.commands.limits import MAX_UINT32
from manylora.cli.commands.load_command import load
from manylora.cli.commands.on_cluster import on_cluster
from manylora.cli.commands.plan_command import plan
from manylora.cli.commands.retention_commands import retention_app
from manylora.cli.commands.tenant_commands import tenant_app
from manylora.cli.commands.up_command import up
from manylora.cli.commands.usage_command import usage_app
from manylora.cli.constraint_options import with_constraint_options
from manylora.cli.output import DEFAULT_SERVER, Json, Key, Server, Target, connect, run, trust, usage_error, write
from manylora.cli.sampling_options import with_sampling_options

MAX_TOKEN_ID = MAX_UINT32
Work = Coroutine[Any, Any, None]

app = typer.Typer(
    help="Many tenants' LoRA adapters on one shared base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
certs_app = typer.Typer(help="Certificates for TLS.", no_args_is_help=True)
cache_app = typer.Typer(help="What workers keep for later requests.", no_args_is_help=True)
app.add_typer(certs_app, name="certs")
app.add_typer(tenant_app, name="tenant")
app.add_typer(key_app, name="key")
app.add_typer(audit_app, name="audit")
app.add_typer(adapter_app, name="adapter")
app.add_typer(cache_app, name="cache")
app.add_typer(encryption_app, name="encryption")
app.add_typer(retention_app, name="retention")
app.add_typer(usage_app, name="usage")
app.command()(load)
app.command()(plan)
app.command()(up)


class Thumb(enum.StrEnum):
    UP = "up"
    DOWN = "down"


class ServiceClass(enum.StrEnum):
    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


Composed = Annotated[str, typer.Option(help="NAME[@VERSION], or several: a+b:0.5; without one the base model answers.")]
Model = Annotated[
    str, typer.Option(help="A base model's name, or a pool's; default: the adapter's, or the policy's first.")
]
User = Annotated[str, typer.Option(help="The end user, who keeps an adapter's version while a rollout goes on.")]
Conversation = Annotated[str, typer.Option(help="The conversation: the same.")]
Priority = Annotated[
    int | None, typer.Option(min=-100, max=100, help="Among the tenant's own requests; higher is sooner.")
]
TemplateKwarg = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=JSON", help="A variable of the chat template; may be repeated."),
]
RequestClass = Annotated[ServiceClass | None, typer.Option("--class", help="Service class; default: the router's.")]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        write(f"manylora {importlib.metadata.version('manylora')}\n")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show it.")] = False,
    tls_ca: Annotated[
        str | None,
        typer.Option(
            envvar="MANYLORA_TLS_CA",
            metavar="FILE",
            help="Who signs the router's certificate (PEM), or `system`; default: a local cluster's, else plain text.",
        ),
    ] = None,
) -> None:
    trust(tls_ca)


@certs_app.command("init")
def certs_init(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Where ca.pem, service.pem and their keys lie.")],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A host name or address of a service; may be repeated. localhost is in it."),
    ] = None,
) -> None:
    """Make an authority where the folder has none, and a new certificate by it; services take it without a restart."""
    from manylora.cli import certificates

    certificates.init(folder, host or [])


@app.command()
def demo(as_json: Json = False) -> None:
    """Four tenants stream from their own adapters of a small trained model; every answer is checked."""
    from manylora.cli import cluster

    run(cluster.demo(as_json=as_json), as_json=as_json)


@app.command()
@with_constraint_options
@with_sampling_options
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; `-` reads it from stdin.")] = None,
    tenant: Annotated[str, typer.Option(help="The tenant; a key that is bound to one needs no other.")] = "",
    adapter: Composed = "",
    model: Model = "",
    qos_class: RequestClass = None,
    priority: Priority = None,
    user: User = "",
    conversation: Conversation = "",
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="The deadline; default: none.")] = None,
    token_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="The prompt as token ids instead of text.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=0, max=MAX_TOKEN_ID, help="0: the router's default.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, max=8, help="Choices, shown one after the other.")] = 1,
    system: Annotated[str | None, typer.Option(help="The system's message, before the prompt's.")] = None,
    prefill: Annotated[
        str | None,
        typer.Option(help="The answer's beginning: the model goes on from there, and what it adds is shown."),
    ] = None,
    template_kwarg: TemplateKwarg = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt as it is, and not by the model's chat template.")
    ] = False,
    *,
    sampling: Sampling,
    constraint: Constraint | None,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Stream one answer, to a chat message where the model has a chat template.

    With --json it streams to stderr and ends with one object on stdout.
    """
    if timeout is not None and not timeout > 0:
        raise usage_error("--timeout: must be above 0")
    _one_prompt(prompt, token_ids)
    for option, given in (("--system", system), ("--prefill", prefill), ("--template-kwarg", template_kwarg)):
        if given and (raw or prompt is None):
            raise usage_error(f"{option}: needs a PROMPT, and goes by the chat template, so not with --raw")
    from manylora.cli import generation

    run(
        generation.generate(
            connect(server, key),
            generation.prompts(prompt, system, prefill, is_raw=raw, is_chat=bool(template_kwarg))
            if prompt is not None
            else [_token_ids(token_ids or "")],
            tenant=tenant,
            adapter=adapter,
            model=model,
            qos_class=qos_class.value if qos_class else "",
            priority=priority,
            user=user,
            conversation=conversation,
            timeout_s=timeout,
            max_tokens=max_tokens,
            sampling=sampling,
            constraint=constraint,
            stop=stop or [],
            n=n,
            continue_final_message=prefill is not None,
            chat_template_kwargs=generation.template_kwargs(template_kwarg or []),
            as_json=as_json,
        ),
        as_json=as_json,
    )


def _one_prompt(prompt: str | None, token_ids: str | None) -> None:
    if (prompt is None) == (token_ids is None):
        raise usage_error("give either a PROMPT or --token-ids")


@app.command()
@with_sampling_options
def chat(
    tenant: Annotated[str, typer.Option(help="The tenant; a key that is bound to one needs no other.")] = "",
    adapter: Composed = "",
    model: Model = "",
    user: User = "",
    qos_class: RequestClass = None,
    system: Annotated[str | None, typer.Option(help="The system's message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=0, max=MAX_TOKEN_ID, help="0: the router's default.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")] = None,
    template_kwarg: TemplateKwarg = None,
    *,
    sampling: Sampling,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Talk with the model or an adapter, turn by turn; lines come from stdin, answers stream to stdout."""
    from manylora.cli import generation
    from manylora.cli.interactive import chat

    chat.chat(
        connect(server, key),
        chat.Talk(system, adapter),
        tenant=tenant,
        model=model,
        user=user,
        qos_class=qos_class.value if qos_class else "",
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop or [],
        chat_template_kwargs=generation.template_kwargs(template_kwarg or []),
    )


@app.command()
@on_cluster
def feedback(
    request_id: Annotated[str, typer.Argument(help="Of the answer, as --json and HTTP answers name it.")],
    score: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="From 0 (bad) to 1 (good).")] = None,
    thumb: Annotated[Thumb | None, typer.Option(help="In the score's place: up is 1, down is 0.")] = None,
    tenant: Annotated[str, typer.Option(help="The tenant; a key that is bound to one needs no other.")] = "",
    *,
    target: Target,
    as_json: bool,
) -> Work:
    """Say how good an earlier answer was."""
    if (score is None) == (thumb is None):
        raise usage_error("give either --score or --thumb")
    from manylora.cli import generation

    given = score if score is not None else float(thumb is Thumb.UP)
    return generation.feedback(target, request_id, given, tenant=tenant, as_json=as_json)


@app.command()
@on_cluster
def status(*, target: Target, as_json: bool) -> Work:
    """Show the cluster: workers, routers, scheduler, flows."""
    from manylora.cli import overview

    return overview.show(target, as_json=as_json)


@app.command()
@on_cluster
def drain(
    instance_id: Annotated[str, typer.Argument(metavar="ID", help="Of a worker, a router or a scheduler.")],
    *,
    target: Target,
    as_json: bool,
) -> Work:
    """Let a service end in order: workers and routers hand their streams over, a scheduler its leadership."""
    from manylora.cli import overview

    return overview.drain(target, instance_id, as_json=as_json)


@cache_app.command("drop")
@on_cluster
def drop_caches(
    worker_id: Annotated[str, typer.Argument(metavar="WORKER", help="Its id, as the status has it.")],
    adapters: Annotated[bool, typer.Option("--adapters", help="Only adapters, on device and host.")] = False,
    prefixes: Annotated[bool, typer.Option("--prefixes", help="Only prefixes of prompts.")] = False,
    *,
    target: Target,
    as_json: bool,
) -> Work:
    """Let a worker forget adapters and prefixes; what runs, what is waited for and what is pinned stays."""
    from manylora.cli import overview

    both = adapters == prefixes
    return overview.drop_caches(
        target, worker_id, adapters=adapters or both, prefixes=prefixes or both, as_json=as_json
    )


@app.command()
def top(
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, max=60.0, help="Between two looks.")] = 1.0,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Watch tenants, flows and workers in the terminal, sorted by what a key chooses."""
    from manylora.cli.interactive import top

    run(top.show(connect(server, key), interval), as_json=False)


def _token_ids(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    for word in words:
        if not (word.isascii() and word.isdigit()) or int(word) > MAX_TOKEN_ID:
            raise usage_error(f"--token-ids: {word!r} is not a token id")
    return [int(word) for word in words]
