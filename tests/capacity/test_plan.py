"""Plans: what they keep, how they grow, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from manylora.capacity.files import packaged_curves, read_mix
from manylora.capacity.planning.curve import Curve, find_curve, with_fp8_kv, with_quantization
from manylora.capacity.planning.plan import Plan, Wanted, arena_bytes, document_of, plan
from manylora.capacity.planning.play import play
from manylora.capacity.planning.shapes import CONFIGS, GPUS, SHAPES, CannotPlan, shape_of
from manylora.capacity.planning.sums import with_ranks
from manylora.capacity.planning.traffic import Request, Traffic, traffic_of_mix
from manylora.capacity.view import shown

CURVE = find_curve(packaged_curves(), GPUS["H100"], SHAPES["llama-3.1-8b"])
MIX = """
duration_s: 20
arrivals: {{kind: poisson, rate: {rate}}}
tenants:
  "t{{n}}":
    count: 4
    prompt_tokens: 64-512
    output_tokens: 16-128
    adapters: {{pattern: "a{{n}}", count: 8}}
    rank: {rank}
"""


def traffic(rate: float = 20, rank: int = 16) -> Traffic:
    return traffic_of_mix(read_mix(MIX.format(rate=rate, rank=rank), "mix"), seconds=20, rank=16)


def made(rate: float, *, slots: int | None = 128) -> Plan:
    return plan(traffic(rate), CURVE, Wanted(gpu_hour=2.0, slots=slots))


def test_a_plan_keeps_its_objective_and_one_worker_less_does_not() -> None:
    found = made(200)
    assert found.workers > 1
    assert found.expected.percentile("ttft_ms", 0.95) <= 500
    fewer = plan(found.traffic, CURVE, replace(found.wanted, workers=found.workers - 1))
    hurried = found.traffic.faster(1.25)
    late = play(CURVE, fewer.settings, fewer.workers, hurried)
    assert late.percentile("ttft_ms", 0.95) > 500 or late.seconds > 1.1 * hurried.seconds


def test_given_workers_are_kept_and_too_few_are_told() -> None:
    asked = traffic(300)
    few = plan(asked, CURVE, Wanted(workers=1, slots=64))
    assert (few.workers, few.holds) == (1, False)
    assert few.tokens_per_s < asked.output_tokens_per_s / 2
    assert "TOO FEW" in shown(document_of(few))
    many = plan(asked, CURVE, Wanted(workers=13, slots=64))
    assert (many.workers, many.holds, many.tokens_per_s) == (13, True, asked.output_tokens_per_s)
    assert "TOO FEW" not in shown(document_of(many))


def test_an_objective_that_no_cluster_keeps_is_refused() -> None:
    with pytest.raises(CannotPlan, match=r"--ttft-ms: no first token comes within 5 ms; alone one takes 1"):
        plan(traffic(), CURVE, Wanted(ttft_ms=5))
    with pytest.raises(CannotPlan, match="no number of workers and slots keeps the objectives"):
        plan(traffic(), CURVE, Wanted(tpot_ms=5))


def test_more_traffic_costs_more_and_a_full_worker_less_a_token() -> None:
    small, large = made(5), made(200)
    assert small.workers == 1 < large.workers
    cheap, dear = large.million(large.tokens_per_s), small.million(small.tokens_per_s)
    assert cheap is not None
    assert dear is not None
    assert cheap < dear
    assert dear == pytest.approx(2.0 / 3600 / small.tokens_per_s * 1e6)


def test_large_traffic_is_planned_in_cells() -> None:
    found = made(900)
    assert found.cells > 1
    assert found.workers % found.cells == 0
    assert found.workers == pytest.approx(900 / 200 * made(200).workers, rel=0.35)


def long_answers(rate: float, seconds: float, output: int) -> Traffic:
    mix = f"tenants: {{a: {{prompt_tokens: 200, output_tokens: {output}}}}}\narrivals: {{rate: {rate}}}"
    return traffic_of_mix(read_mix(f"{mix}\nduration_s: {seconds}", "mix"), seconds=seconds, rank=16)


@pytest.mark.parametrize(
    ("rate", "seconds", "output"), [(10, 3, 16_000), (1, 10, 16_000), (0.2, 60, 64_000), (10, 30, 4_000)]
)
def test_few_requests_are_all_played_and_the_plan_says_so(rate: float, seconds: float, output: int) -> None:
    """However many workers they ask for."""
    asked = long_answers(rate, seconds, output)
    found = plan(asked, CURVE, Wanted(slots=16))
    assert (found.cells, len(found.played.requests)) == (1, len(asked.requests))
    document = document_of(found)
    played = {"requests": len(asked.requests), "workers": found.workers, "is_small_sample": True}
    assert document["played"] == played
    assert f"only {len(asked.requests)} requests were played, on {found.workers} worker" in shown(document)


def test_a_cell_has_requests_enough_and_the_plan_does_not_doubt_it() -> None:
    found = plan(long_answers(60, 30, 2_000), CURVE, Wanted(slots=32))
    assert 1 < found.cells <= len(found.traffic.requests) // 400
    assert len(found.played.requests) > 300
    assert not document_of(found)["played"]["is_small_sample"]
    assert "requests were played" not in shown(document_of(found))


def test_what_few_requests_cannot_show_is_refused() -> None:
    requests = [Request(n * 1e-9, "t", "standard", "", 0, 100, 100) for n in range(10)]
    with pytest.raises(CannotPlan, match=r"10 requests show the traffic of some .* workers too coarsely"):
        plan(Traffic(requests, 1e-8), CURVE, Wanted())


def test_the_document_adds_up() -> None:
    document = document_of(made(20, slots=None))
    arena = document["arena"]
    assert arena["adapters_resident"] == document["traffic"]["adapters"] == 32
    assert arena["kv_mb"] + arena["device_adapter_mb"] <= arena["gib"] * 1024
    assert document["worker_flags"].startswith(f"--sequence-slots {document['sequence_slots']} --device-adapter-mb ")
    assert document["curve"]["measured"]
    assert {rule["rule"] for rule in document["rules"]} == {"evictions", "merge", "rank-waste", "kv"}


def test_kv_in_fp8_holds_twice_the_tokens() -> None:
    """In the same arena, and nothing of the rest costs more."""
    one = Wanted(slots=128, workers=1)
    base = Traffic([replace(each, adapter="", rank=0) for each in traffic().requests], 20.0)
    plain, fp8 = (document_of(plan(base, curve, one)) for curve in (CURVE, with_fp8_kv(CURVE)))
    assert fp8["arena"]["gib"] == plain["arena"]["gib"]
    assert fp8["arena"]["kv_tokens"] == pytest.approx(2 * plain["arena"]["kv_tokens"], rel=0.05)
    assert fp8["expected"]["mean_step_ms"] < plain["expected"]["mean_step_ms"]
    assert "--kv-cache-dtype fp8" in fp8["worker_flags"]
    assert "--kv-cache-dtype" not in plain["worker_flags"]
    assert "estimated: by half its bytes" in fp8["curve"]["origin"]


def test_kv_in_fp8_is_not_planned_where_workers_refuse_it() -> None:
    old = find_curve(packaged_curves(), GPUS["A100"], SHAPES["llama-3.1-8b"])
    with pytest.raises(CannotPlan, match="--kv-cache-dtype fp8: A100 has no FP8"):
        with_fp8_kv(old)


def test_a_hybrid_finds_no_prefix_again() -> None:
    """A prompt that is cached elsewhere is computed whole, and the document says what a state takes."""
    curve = find_curve(packaged_curves(), GPUS["H100"], SHAPES["qwen3.5-9b"])
    base = traffic()
    cached = replace(base, requests=[replace(r, cached_tokens=r.prompt_tokens - 1) for r in base.requests])
    plans = [document_of(plan(each, curve, Wanted(slots=64, workers=1))) for each in (base, cached)]
    assert plans[0] == plans[1]
    assert plans[0]["arena"]["state_tokens"] == curve.shape.state_tokens
    assert f"a sequence's state takes {curve.shape.state_tokens:,} tokens" in shown(plans[0])


def test_a_model_that_does_not_fit_is_refused() -> None:
    large = find_curve(packaged_curves(), GPUS["H100"], SHAPES["llama-70b"])
    with pytest.raises(CannotPlan, match=r"llama-70b: its weights take 131 GiB, and one H100 has 79"):
        plan(traffic(), large, Wanted())
    request = Request(0.0, "t", "standard", "", 0, 1_000_000, 8)
    with pytest.raises(CannotPlan, match="the longest request, 1000008 tokens, does not fit"):
        plan(Traffic([request], 1.0), CURVE, Wanted())


def rules(found: Plan) -> dict[str, tuple[bool, str]]:
    return {rule.name: (rule.act, rule.says) for rule in found.rules}


def test_a_hot_adapter_is_told_to_be_merged() -> None:
    base = traffic(200)
    hot = [replace(r, tenant="t0", adapter="t0/a0") if n % 10 else r for n, r in enumerate(base.requests)]
    act, says = rules(plan(replace(base, requests=hot), CURVE, Wanted(slots=128)))["merge"]
    assert act
    assert "t0/a0 has 9" in says
    assert not rules(made(200))["merge"][0]


def test_a_few_high_ranks_are_told_to_cost_all() -> None:
    base = traffic(60)
    high = [replace(r, rank=64) if r.adapter == "t0/a3" else r for r in base.requests]
    act, says = rules(plan(replace(base, requests=high), CURVE, Wanted(slots=64)))["rank-waste"]
    assert act
    assert "up to 64" in says
    assert not rules(made(60))["rank-waste"][0]


def of_70b(gpu: str, ranks: int) -> Curve:
    packaged = packaged_curves()
    whole = find_curve(packaged, GPUS[gpu], SHAPES["llama-70b"])
    return with_ranks(whole, shape_of(CONFIGS["llama-70b"], "llama-70b", ranks=ranks), packaged)


def test_a_model_over_several_gpus_is_planned_by_what_one_of_them_has() -> None:
    found = plan(traffic(), of_70b("H200", 2), Wanted(gpu_hour=2.0, slots=32, host_gib=32.0))
    document = document_of(found)
    assert (document["gpus_a_worker"], document["cost"]["hour"]) == (2, 4.0 * found.workers)
    assert document["weights_gib"] == pytest.approx(66.7, abs=0.1), "half of it, and all of the embeddings"
    assert found.settings.host_bytes == 16 << 30
    assert "--tensor-parallel 2" in document["worker_flags"]
    assert "merge" not in {rule["rule"] for rule in document["rules"]}, "shared layers are not merged"
    assert "each 2 H200 with llama-70b" in shown(document)


def test_a_model_that_does_not_fit_is_told_to_be_shared() -> None:
    with pytest.raises(CannotPlan, match="one H100 has 79: --tensor-parallel 2 shares them among more"):
        plan(traffic(), find_curve(packaged_curves(), GPUS["H100"], SHAPES["llama-70b"]), Wanted())
    with pytest.raises(CannotPlan, match=r"each of 2 H100 has 79: --tensor-parallel 4 shares"):
        plan(
            traffic(), replace(of_70b("H100", 2), shape=replace(CURVE.shape, ranks=2, weight_bytes=90 << 30)), Wanted()
        )


def in_fp8(gpu: str, name: str) -> Curve:
    shape = shape_of(CONFIGS[name], name, "fp8")
    return with_quantization(find_curve(packaged_curves(), GPUS[gpu], SHAPES[name]), shape, packaged_curves())


def test_experts_that_are_quantized_at_the_start_must_fit_before_they_are() -> None:
    """A worker has them on the device first, and other layers one by one."""
    dense, mixture = in_fp8("H100", "llama-70b"), in_fp8("H200", "80b-a3b")
    assert dense.shape.load_bytes == dense.shape.weight_bytes < 70 << 30
    assert mixture.shape.weight_bytes < 80 << 30
    assert arena_bytes(dense) > 0
    with pytest.raises(
        CannotPlan, match=r"before they are quantized its weights take 14\d GiB on the device, and one H200"
    ):
        plan(traffic(), mixture, Wanted())


def test_blocks_of_kv_in_fp8_are_told_where_a_worker_wants_larger_ones() -> None:
    def flags(shape: str) -> str:
        curve = with_fp8_kv(find_curve(packaged_curves(), GPUS["H100"], SHAPES[shape]))
        return str(document_of(plan(traffic(5), curve, Wanted(slots=32)))["worker_flags"])

    assert "--kv-cache-dtype fp8 --block-size 32" in flags("qwen3.5-9b")
    assert "--block-size" not in flags("llama-3.1-8b")
