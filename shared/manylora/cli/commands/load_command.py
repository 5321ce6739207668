"""`manylora load` and its options."""

from __future__ import annotations

import enum
import inspect
from pathlib import Path
from typing import Annotated

import typer

from manylora.cli.commands.limits import finite
from manylora.cli.output import Json, connect, run, usage_error


class Arrivals(enum.StrEnum):
    POISSON = "poisson"
    CONSTANT = "constant"
    GAMMA = "gamma"
    ON_OFF = "on-off"
    DIURNAL = "diurnal"


MixFile = Annotated[
    Path | None,
    typer.Argument(exists=True, dir_okay=False, allow_dash=True, help="YAML: many tenants; else flags say one."),
]
Url = Annotated[str, typer.Option(metavar="URL", help="The server; default: the mix's, or a local cluster's.")]
Duration = Annotated[
    float | None, typer.Option(metavar="SECONDS", callback=finite, min=0.1, help="For how long requests are sent.")
]
Requests = Annotated[int | None, typer.Option(min=1, help="How many are sent at most.")]
Warmup = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", callback=finite, min=0, help="What was sent in the first seconds does not count."),
]
Seed = Annotated[int | None, typer.Option(min=0, help="The same one sends the same requests; default: 1.")]
Rate = Annotated[
    float | None, typer.Option(min=0, callback=finite, help="Requests a second, however long answers take.")
]
How = Annotated[
    Arrivals,
    typer.Option(
        help="How they come; gamma: in bursts (--cv); on-off: 5 s of 20; diurnal: a day in 10 minutes. A mix says more."
    ),
]
Cv = Annotated[
    float | None,
    typer.Option(min=0.01, max=100, callback=finite, help="With gamma: how bursty; 1 is Poisson; default: 2."),
]
Streams = Annotated[int | None, typer.Option(min=1, help="Instead of a rate: callers that each await their answer.")]
TraceFile = Annotated[
    Path | None, typer.Option(help="Instead of a rate: a trace's times and lengths (CSV or JSON lines, .gz too).")
]
Speed = Annotated[float, typer.Option(min=0.001, callback=finite, help="With --trace: times as fast.")]
LengthScale = Annotated[float, typer.Option(min=0.001, callback=finite, help="With --trace: times as long.")]
Model = Annotated[str, typer.Option(help="Default: the first that the server lists.")]
Adapter = Annotated[
    list[str] | None, typer.Option(help="Sent as the model; may be repeated, from the most used one on.")
]
Zipf = Annotated[float, typer.Option(min=0, callback=finite, help="Exponent of the adapters' use; 0: all alike.")]
Tokens = Annotated[str | None, typer.Option(metavar="TOKENS", help="128, or a range: 64-512; default: 128.")]
PrefixTokens = Annotated[int, typer.Option(min=0, help="Of the prompt: the same in all.")]
Chat = Annotated[bool, typer.Option("--chat", help="Chat completions instead of completions.")]
PromptIds = Annotated[bool, typer.Option("--prompt-ids", help="Prompts as token ids, of exact lengths.")]
Eos = Annotated[bool, typer.Option("--eos", help="Answers end where the model ends them (no `ignore_eos`).")]
TenantName = Annotated[str, typer.Option(help="With a gateway's or operator's key: in whose name.")]
ServiceClass = Annotated[str, typer.Option("--class", help="Service class; default: the server's.")]
Limit = Annotated[
    float | None, typer.Option(metavar="MS", callback=finite, min=0.1, help="A good answer is within it, for goodput.")
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", callback=finite, min=0.1, max=1e6, help="Of one request.")]
Drain = Annotated[
    float, typer.Option(metavar="SECONDS", callback=finite, min=0, max=1e6, help="How long the last ones may take.")
]
LoadKey = Annotated[
    str | None,
    typer.Option(
        "--key", envvar="MANYLORA_KEY", metavar="KEY", help="Of tenants that name none; default: a local cluster's."
    ),
]


def load(
    mix: MixFile = None,
    url: Url = "",
    duration: Duration = None,
    requests: Requests = None,
    warmup: Warmup = None,
    seed: Seed = None,
    rate: Rate = None,
    arrivals: How = Arrivals.POISSON,
    cv: Cv = None,
    streams: Streams = None,
    trace: TraceFile = None,
    speed: Speed = 1.0,
    length_scale: LengthScale = 1.0,
    model: Model = "",
    adapter: Adapter = None,
    zipf: Zipf = 1.0,
    prompt_tokens: Tokens = None,
    output_tokens: Tokens = None,
    prefix_tokens: PrefixTokens = 0,
    chat: Chat = False,
    prompt_ids: PromptIds = False,
    eos: Eos = False,
    tenant: TenantName = "",
    qos_class: ServiceClass = "",
    slo_ttft: Limit = None,
    slo_tpot: Limit = None,
    slo_e2e: Limit = None,
    timeout: Timeout = 600.0,
    drain: Drain = 60.0,
    key: LoadKey = None,
    as_json: Json = False,
) -> None:
    """Send a mix of tenants to a server that speaks OpenAI's API, and tell what its callers saw.

    Latencies count from when a request was due, not from when it could be sent.
    """
    given = locals().copy()
    changed = [name for name, option in inspect.signature(load).parameters.items() if given[name] != option.default]
    try:
        from manylora.cli.interactive import load as loading
    except ImportError as error:
        raise usage_error(f"{error.name} is not installed; `pip install 'manylora[load]'` brings it") from None
    from manylora_shared.process import loop

    planned = loading.planned(mix, given, changed)
    target = connect("", key)
    running = loading.load(planned, url, target.key, target.tls_ca, timeout_s=timeout, drain_s=drain, as_json=as_json)
    run(running, as_json=as_json, runner=loop.run)
