"""`status`, as JSON and for people."""

from __future__ import annotations

from manylora.cli.overview import _ACCOUNTS, _CIRCUITS, _GIVES_UP
from manylora.client import CircuitStatus
from manylora_shared.tenancy.overload import Rung

from tests.cli.conftest import Manylora
from tests.cli.fake_server import VERSION, FakeRouter


async def test_a_service_is_told_to_leave(manylora: Manylora) -> None:
    assert (await manylora("drain", "w-1")).stdout == "w-1: the worker leaves\n"
    assert (await manylora("drain", "w-1", "--json")).json == {"id": "w-1", "kind": "worker"}
    assert "no worker, router or leading scheduler is called 'w-9'" in (await manylora("drain", "w-9")).stderr


async def test_a_worker_drops_its_caches(manylora: Manylora) -> None:
    said = "w-1: 3 adapters and 40 blocks of prefixes are dropped\n"
    assert (await manylora("cache", "drop", "w-1")).stdout == said
    assert (await manylora("cache", "drop", "w-1", "--adapters", "--prefixes")).stdout == said
    only = await manylora("cache", "drop", "w-1", "--adapters", "--json")
    assert only.json == {"worker_id": "w-1", "adapters": 3, "prefix_blocks": 0}
    only = await manylora("cache", "drop", "w-1", "--prefixes", "--json")
    assert only.json == {"worker_id": "w-1", "adapters": 0, "prefix_blocks": 40}


async def test_status(manylora: Manylora) -> None:
    out = await manylora("status", "--json")
    assert out.json["base_model"] == "tiny"
    assert out.json["sampling_defaults"] == {"temperature": 0.6, "top_k": 20}
    told = "\nsampling   temperature 0.6, top_k 20, where a request sets none (generation_config.json)\n"
    assert told in (await manylora("status")).stdout
    assert out.json["scheduler"]["flows"][0]["qos_class"] == "batch"
    assert out.json["resumed"] == 7
    assert "\nresumed    7 times another worker went on with an answer\n" in (await manylora("status")).stdout
    assert out.json["workers"][0]["generated_tokens"] == 2**40
    assert out.json["workers"][0]["cold_store_s"] == 0.25
    told = (await manylora("status")).stdout
    assert "device 90 %, store 10 %" in told
    assert "store 250 ms" in told
    assert f"merged     w-1 acme/upper ({'ab' * 6})\n" in told
    assert "w-1 did not merge an adapter: no memory\n" in told
    advice = "acme/upper has 43% of pool default's requests and fills 1 of its 3 workers by itself"
    assert f"to merge   {advice}: see adapters.dedicated\n" in told
    assert [each["kept_out"] for each in out.json["workers"]] == ["", "its dtype is another"]
    measured, idle = out.json["slos"]
    assert (measured["error_budget"], measured["ttft_p95_target_ms"], measured["ttft_met"]) == (0.75, 200, False)
    assert (measured["qos_class"], measured["tpot_p50_ms"]) == ("interactive", None)
    assert (idle["error_budget"], idle["ttft_p95_ms"], idle["ttft_met"]) == (None, None, None)
    assert out.json["circuits"][0] == {
        "tenant_id": "acme",
        "whole_tenant": False,
        "adapter_version": VERSION,
        "router_id": "r-1",
        "half_open": False,
        "retry_after_s": 1.5,
        "openings": 2,
    }
    assert out.json["scheduler"]["etcd"] == {"used_bytes": 3 << 20, "quota_bytes": 64 << 20, "full": False}
    overload = out.json["scheduler"]["overload"]
    assert (overload["level"], overload["rung"]) == (40, "batch_output")
    assert overload["classes"][0]["late_part"] == 0.125
    assert overload["classes"][1] == {
        "qos_class": "batch",
        "late_part": None,
        "target_ms": None,
        "refused_by_routers": 30,
        "refused": 1,
        "shed": 4,
        "capped": 9,
    }
    assert overload["tenants"] == [{"tenant_id": "acme", "level": 97, "rung": "interactive", "demand_shares": 3.5}]
    assert out.json["scheduler"]["neighbours"] == [
        {
            "kind": "kv_growth",
            "tenant_id": "acme",
            "worker_id": "w-1",
            "evidence": {"kv_blocks": 12345.0, "kv_part": 0.75},
        }
    ]
    acme, birch = out.json["scheduler"]["adapters"]
    assert (acme["device_bytes"], acme["evictions"], acme["displaced"], birch["pins"]) == (3 << 20, 9, 1, [])
    assert acme["pins"][1] == {
        "name": "lower",
        "adapter_version": "",
        "workers": 2,
        "on_device": 0,
        "problem": "no adapter has this name",
    }
    assert out.json["scheduler"]["setbacks"] == [
        {"tenant_id": "birch", "preemptions": 11, "swaps_out": 4, "evictions": 2, "recomputed_tokens": 512}
    ]
    out = await manylora("status")
    assert out.exit_code == 0
    assert "w-1" in out.stdout
    assert "w-2 is kept out of the pool: its dtype is another" in out.stdout
    assert "overload   level 40 of 128: answers of batch requests are cut short" in out.stdout
    assert _GIVES_UP.keys() == {rung.value for rung in Rung}
    assert "epoch 5" in out.stdout
    assert "r-1 (127.0.0.1:1, not answering)" in out.stdout
    assert "budgets    r-1 has no prices: quotas.monthly_spend of 2 has no effect there" in out.stdout
    rows = [line.split("  ") for line in out.stdout.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert ["batch", "-", "half the deadline", "31", "4", "9"] in cells
    assert ["interactive", "12 %", "200 ms", "0", "0", "0"] in cells
    assert ["acme", "3.5", "97", "interactive requests are given up"] in cells
    assert ["acme", "3.0 MiB", "2.5 MiB", "9", "1", "1 of 3"] in cells
    assert ["birch", "0.0 MiB", "0.0 MiB", "0", "0", "-"] in cells
    assert ["acme", "lower", "0 of 2", "no adapter has this name"] in cells
    assert ["acme", "words", "1 of 2", "being loaded"] in cells
    assert ["acme", "kv_growth", "w-1", "kv_blocks 12345, kv_part 0.75"] in cells
    setbacks = cells.index(["tenant's sequences", "preemptions", "swaps out", "evictions", "recomputed tokens"])
    assert ["birch", "11", "4", "2", "512"] in cells[setbacks:]
    level = ["acme", "interactive", "12.3 ms", "240 ms", "200 ms, missed", "-", "-"]
    assert [*level, "400, 1 failed", "99.750 %", "99 %", "75 %"] in cells
    assert ["birch", "batch", "-", "-", "-", "-", "-", "0, 0 failed", "100.000 %", "-", "-"] in cells
    assert ["acme", f"adapter {VERSION[:12]}", "r-1", "open", "1.5 s"] in cells
    assert ["birch", "3", "r-1", "300 s"] in cells[
        cells.index(["tenant", "quarantined prompts", "router", "for another"]) :
    ]
    assert ["acme", "1.5 MiB", "1.0 MiB"] in cells[cells.index(["tenant's KV", "on devices", "most on one"]) :]
    accounts = cells.index([name for name, _ in _ACCOUNTS])
    assert ["acme", "batch", "2", "64", "900", "-7"] in cells[accounts:]
    assert ["birch", "standard", "1", "0", "50", "no bucket"] in cells[accounts:]


async def test_a_tenants_status_says_nothing_of_machines(manylora: Manylora, router: FakeRouter) -> None:
    router.tells_tenant_alone = True
    out = await manylora("status")
    gives_up = "answers of batch requests are cut short"
    shown = f"model      tiny\nscheduler  reachable\nadapters   2\n\noverload   level 40 of 128: {gives_up}\n"
    assert (out.exit_code, out.stdout, out.stderr) == (0, shown, "")


async def test_rollouts_stand_with_what_is_known_against_them(manylora: Manylora) -> None:
    out = await manylora("status", "--json")
    assert [(r["name"], r["rollout"]["percent"]) for r in out.json["rollouts"]] == [("up", 10), ("down", 5)]
    lines = [" ".join(line.split()) for line in (await manylora("status")).stdout.splitlines()]
    assert "acme up@2 beside 1 10 % by user 1 > 10 > 50 7 of 200 2.5 of 100" in lines
    assert "acme down@2 beside 1 5 % by request by hand - -" in lines


def test_a_circuit_of_several_adapters_names_all() -> None:
    version = f"{'a' * 64}+{'b' * 64}:0.5"
    circuit = CircuitStatus("acme", False, version, "r-1", False, 1.0, 1)
    assert dict(_CIRCUITS)["refused"](circuit) == f"adapter {'a' * 12}+{'b' * 12}"
