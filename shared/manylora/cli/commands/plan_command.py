"""`manylora plan` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manylora.cli.commands.limits import finite
from manylora.cli.commands.up_command import KvCacheDtype, KvCacheDtypeOption, Quantization
from manylora.cli.output import Json, print_json, usage_error, write

MOST_WORKERS = 2_000  # each is played
_FILE = {"exists": True, "dir_okay": False}
Mix = Annotated[
    Path | None,
    typer.Option("--tenants", help="YAML: the mix that `manylora load` sends.", allow_dash=True, **_FILE),
]
Ledger = Annotated[
    Path | None,
    typer.Option("--from-ledger", help="The usage ledger's SQLite file, or `manylora usage --format json`.", **_FILE),
]
Model = Annotated[
    str, typer.Option(metavar="SHAPE", help="A known one, such as llama-3.1-8b or 30b-a3b, or a model's folder.")
]
GpuName = Annotated[str, typer.Option("--gpu", help="H100, H200, A100, L40S, L4.")]
Price = Annotated[
    float | None,
    typer.Option("--gpu-hour", min=0, max=1e9, callback=finite, metavar="PRICE", help="Of one GPU for an hour."),
]
Ttft = Annotated[
    float, typer.Option(min=1, callback=finite, metavar="MS", help="p95 of tenants whose mix gives no slo.ttft_ms.")
]
Tpot = Annotated[
    float | None,
    typer.Option(min=0.1, callback=finite, metavar="MS", help="The same for the time between tokens; default: any."),
]
Spare = Annotated[
    float, typer.Option(min=0, max=10, callback=finite, help="Part of the traffic that must fit in beside it.")
]
Rank = Annotated[int, typer.Option(min=1, max=512, help="Of adapters whose rank is not told.")]
Window = Annotated[
    float, typer.Option(min=1, callback=finite, metavar="SECONDS", help="Of the ledger: the busiest so many.")
]
Seconds = Annotated[float, typer.Option(min=1, callback=finite, help="Of a mix without duration_s.")]
HostGib = Annotated[
    float, typer.Option(min=0.1, max=1e6, callback=finite, help="Host memory of a worker for adapters.")
]
Slots = Annotated[int | None, typer.Option(min=1, max=512, help="Given, and not searched for.")]
Workers = Annotated[int | None, typer.Option(min=1, max=MOST_WORKERS, help="Given: what these would do.")]
Format = Annotated[Quantization, typer.Option(help="Of the base model's weights, as workers have it.")]
Ranks = Annotated[int, typer.Option(min=1, max=1024, help="GPUs that share the model, as workers have them.")]
CurveFile = Annotated[
    Path | None, typer.Option(help="A step curve of one's own, as bench/plan_check.py measures it.", **_FILE)
]


def plan(
    model: Model,
    gpu: GpuName = "",
    tenants: Mix = None,
    from_ledger: Ledger = None,
    gpu_hour: Price = None,
    ttft_ms: Ttft = 500.0,
    tpot_ms: Tpot = None,
    spare: Spare = 0.25,
    rank: Rank = 16,
    window: Window = 300.0,
    seconds: Seconds = 60.0,
    host_gib: HostGib = 64.0,
    slots: Slots = None,
    workers: Workers = None,
    curve: CurveFile = None,
    quantization: Format = Quantization.NONE,
    kv_cache_dtype: KvCacheDtypeOption = KvCacheDtype.AUTO,
    tensor_parallel: Ranks = 1,
    as_json: Json = False,
) -> None:
    """Say what a traffic needs: workers, slots, the arena's split, latencies, cost, and what to tune.

    It plays the requests on candidates, step by step, by measured step times. Nothing is started, and no server is
    asked.
    """
    if (tenants is None) == (from_ledger is None):
        raise usage_error("give either --tenants FILE or --from-ledger FILE")
    if (not gpu) == (curve is None):
        raise usage_error("give either --gpu NAME or --curve FILE")
    from manylora.capacity import files, view
    from manylora.capacity.planning.plan import Wanted, document_of
    from manylora.capacity.planning.plan import plan as planned
    from manylora.capacity.planning.shapes import CannotPlan
    from manylora.capacity.planning.traffic import traffic_of_ledger, traffic_of_mix
    from manylora.cli.files import name_of, read_file

    try:
        if tenants is not None:
            mix = files.read_mix(read_file(tenants), name_of(tenants))
            traffic = traffic_of_mix(mix, seconds=seconds, rank=rank)
        else:
            assert from_ledger is not None
            traffic = traffic_of_ledger(files.read_ledger(from_ledger), window_s=window, rank=rank)
        fp8_kv = kv_cache_dtype is KvCacheDtype.FP8
        steps = files.read_steps(model, gpu, curve, quantization, ranks=tensor_parallel, fp8_kv=fp8_kv)
        wanted = Wanted(
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            spare=spare,
            gpu_hour=gpu_hour,
            host_gib=host_gib,
            slots=slots,
            workers=workers,
        )
        document = document_of(planned(traffic, steps, wanted))
    except CannotPlan as error:
        raise usage_error(str(error)) from None
    if as_json:
        print_json(document)
    else:
        write(view.shown(document))
