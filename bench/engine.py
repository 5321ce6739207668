"""The engine on one GPU: what a decode step and a prefill cost, with and without adapters, against the bytes' floor.

The models are shapes with random weights (no download). One JSON line a case:

    {"bench": "engine", "case", "batch", "context", "adapters", "rank", "ms_per_step", "tokens_per_s", "floor_ms",
     "fraction", ...}

    decode-base       no row has an adapter
    decode-one        all rows have the same one
    decode-distinct   every row has its own, up to 64 of them
    mixed-rank        as decode-distinct, with ranks 8, 16, 32, 64 in turn
    decode-composed   rows of two adapters each, and rows with one of their ranks together
    decode-kinds      plain adapters; every second with a rotation of its own (LongLoRA), or with gains (DoRA)
    merged            rows of one adapter beside the base model and in its weights, and both ways there and back
    prefill           fresh prompts; fraction is of the matrix ceiling
    zipf-1000, loads, churn, chunk, base-only, arrivals, constrained   traffic through the engine: engine_traffic.py

`ms_per_step` is what a caller of DeviceModelRunner sees: steps submitted one after the other, each taking the tokens
of the one before on the device; `device_ms` is the same graph replayed alone. `floor_ms` is the time to read weights,
KV and distinct adapters once, and write states, at `--read-tb-s`; of experts
those that rows reach which go to them at random. Contexts stay at `--context` tokens, in blocks scattered at random.

    python -m bench.engine [--shape llama-3.1-8b] [--cases decode-base,...] [--batches 1,8,32,64,256]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from manylora_shared.composition import Part, key_of
from manylora_shared.ids import AdapterKey
from manylora_shared.process.heap import freeze_started
from manylora_worker.kinds.api import PENDING_TOKEN, Sampling, SequenceChunk, StepBatch
from manylora_worker.models.checkpoint import Quantization
from manylora_worker.models.cuda.runner import DeviceLimits, DeviceModelRunner
from manylora_worker.models.decoder.read import read_decoder
from manylora_worker.models.layers.attention import ATTENTION, register_attention
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.loader import LoadedModel, prepare_model
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.models.torch.kv_scales import with_fp8_kv
from manylora_worker.weights.host_memory import HostMemory
from manylora_worker.weights.layout import HostAdapter

from bench.engine_adapters import Kind, Resident, make_adapter, make_of_kind, rank_of
from bench.engine_floor import Floor
from bench.shapes import SHAPES, random_model, random_share, shipped_codes

GIB = 1 << 30
GREEDY = Sampling(seed=0, temperature=0.0)
TRAFFIC = ("zipf-1000", "loads", "churn", "chunk", "base-only", "arrivals", "constrained")
MIXED_RANKS = (8, 16, 32, 64)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--cases", default="decode-base,decode-one,decode-distinct,mixed-rank,prefill")
    parser.add_argument("--batches", default="1,8,32,64,256")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--expert-rank", type=int, default=-1, help="of adapters on experts; default: --rank")
    parser.add_argument("--quantization", choices=("none", "nf4", "fp8", "int4"), default="none")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--read-tb-s", type=float, default=4.57, help="measured read ceiling of the device")
    parser.add_argument("--matrix-tflops", type=float, default=786.0, help="measured bf16 ceiling of the device")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share the model; no traffic cases")
    parser.add_argument("--all-reduce", choices=("nccl", "two-shot"), default="nccl")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)  # RANK:STORE, of a process started here
    parser.add_argument("--guesses", action="store_true", help="traffic: tenants' likely next adapters are loaded")
    parser.add_argument("--profile", default="", help="print the kernels of one step of these case:batch")
    return parser.parse_args()


def make_model(shape: str, quantization: Quantization, group: RankGroup | None = None) -> LoadedModel:
    register_attention()
    if group is not None:
        share, modules = random_share(shape, group, attn_implementation=ATTENTION)
        share.eval().requires_grad_(False)
        return prepare_model(share, name=shape, quantization=quantization, modules=modules, group=group)
    model = random_model(shape, "cuda", attn_implementation=ATTENTION)
    model.eval().requires_grad_(False)
    codes = shipped_codes(model) if quantization == "int4" else None
    return prepare_model(model, name=shape, quantization=quantization, codes=codes)


def make_chunk(
    sequence_id: int, token_ids: Sequence[int], start: int, blocks: Sequence[int], adapter_key: AdapterKey | None
) -> SequenceChunk:
    return SequenceChunk(
        sequence_id=sequence_id,
        token_ids=token_ids,
        start_position=start,
        block_table=blocks,
        adapter_uid=adapter_key,
        samples=True,
        sampling=GREEDY,
        choice=0,
        output_index=0,
        prompt_token_ids=(),
        output_token_ids=(),
    )


def join(options: argparse.Namespace) -> RankGroup | None:
    """Starts the other ranks: they run the same program."""
    if options.tensor_parallel == 1:
        return None
    rank, _, store = options.rank_of.partition(":")
    if not store:
        store = str(Path(tempfile.mkdtemp()) / "store")
        for other in range(1, options.tensor_parallel):
            subprocess.Popen([sys.executable, "-m", "bench.engine", *sys.argv[1:], f"--rank-of={other}:{store}"])
    device = torch.device("cuda", int(rank or 0))
    is_symmetric = options.all_reduce == "two-shot"
    return RankGroup(int(rank or 0), options.tensor_parallel, device, Path(store), is_symmetric=is_symmetric)


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.batches = [int(b) for b in options.batches.split(",")]
        started = time.perf_counter()
        self.group = join(options)
        self.loaded = make_model(options.shape, options.quantization, self.group)
        weights = read_decoder(self.loaded)
        assert weights is not None
        if options.kv_cache_dtype == "fp8":
            self.loaded = with_fp8_kv(self.loaded)
        spec = self.loaded.spec
        block_bytes = spec.kv.token_bytes(torch.bfloat16) * options.block_size
        kv_tokens = max(max(self.batches) * (options.context + 64), 16 * 1024)
        self.state_blocks = spec.kv.state_blocks(options.block_size, torch.bfloat16)
        num_kv = kv_tokens // options.block_size + 600 + max(16, *self.batches) * self.state_blocks
        mixes_ranks = bool({"mixed-rank", "decode-composed", "decode-kinds"} & set(options.cases.split(",")))
        largest = max(options.rank, 32 if mixes_ranks else 0)
        adapter_bytes = make_adapter(self.loaded, 0, largest, options.expert_rank).size_bytes
        num_adapter = int((2.4 if mixes_ranks else 1.5) * options.adapters * adapter_bytes / block_bytes) + 64
        cache = KvCache(
            spec.kv, num_blocks=num_kv + num_adapter, block_size=options.block_size, dtype=torch.bfloat16,
            device=self.loaded.device,
        )  # fmt: skip
        if spec.kv.scales:
            cache.by_block[:num_kv].random_(0, 0x70)  # codes of numbers
        else:
            cache.flat[: num_kv * block_bytes // 2].normal_()
        limits = DeviceLimits(max_rows=8192, max_sequences=max(self.batches), adapter_slots=256, max_rank=64)
        self.runner = DeviceModelRunner(self.loaded, weights, cache, limits, num_kv_blocks=num_kv)
        self.floor = Floor(self.loaded, options.tensor_parallel)
        self.blocks = torch.randperm(num_kv).tolist()
        self.adapters = Resident(self.loaded, self.runner, options.expert_rank)
        self.print(case="start", seconds=round(time.perf_counter() - started, 1), arena_gib=cache.size_bytes / GIB)

    def print(self, **values: Any) -> None:
        if self.group is not None:
            if self.group.rank:
                return
            values = {"tensor_parallel": self.group.size, "all_reduce": self.options.all_reduce, **values}
        if self.loaded.spec.kv.scales:
            values = {"kv_cache_dtype": "fp8", **values}
        line = {"bench": "engine", "shape": self.options.shape, "quantization": self.options.quantization, **values}
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}), flush=True)

    def batch(self, rows: int, adapters: Sequence[HostAdapter], parts_a_row: int = 1) -> StepBatch:
        context, size = self.options.context, self.options.block_size
        blocks = self.state_blocks + -(-context // size)
        chunks = [
            make_chunk(
                row + 1,
                [PENDING_TOKEN],
                context - 1,
                self.blocks[row * blocks : (row + 1) * blocks],
                key_of([Part(adapters[(row * parts_a_row + i) % len(adapters)].uid) for i in range(parts_a_row)])
                if adapters
                else None,
            )
            for row in range(rows)
        ]
        return StepBatch(chunks)

    def decode(self, case: str, rows: int, adapters: Sequence[HostAdapter], parts_a_row: int = 1) -> None:
        options = self.options
        batch = self.batch(rows, adapters, parts_a_row)
        started = time.perf_counter()
        for _ in range(5):
            self.runner.submit(batch).result()
        capture_s = time.perf_counter() - started
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            pending = None
            for _ in range(options.steps):
                following = self.runner.submit(batch)
                if pending is not None:
                    pending.result()
                pending = following
            assert pending is not None
            pending.result()
            times.append((time.perf_counter() - started) / options.steps * 1e3)
        ms = statistics.median(times)
        replay = self.runner.graph_of(batch)
        device_ms = time_events(replay.replay, options.steps)
        distinct = {a.uid: a for a in adapters[: rows * parts_a_row]}
        read = [(each, self.adapters.sizes[uid]) for uid, each in distinct.items()]
        floor_bytes = self.floor.step_bytes(rows, options.context, read, rows * parts_a_row / max(1, len(distinct)))
        floor_ms = floor_bytes / options.read_tb_s / 1e9
        ranks = sorted({rank_of(a) for a in adapters})
        self.print(
            case=case,
            batch=rows,
            context=options.context,
            adapters=len(distinct),
            rank=ranks[0] if len(ranks) == 1 else ranks,
            ms_per_step=ms,
            device_ms=device_ms,
            tokens_per_s=rows / ms * 1e3,
            floor_ms=floor_ms,
            fraction=floor_ms / ms,
            capture_s=capture_s,
        )
        if f"{case}:{rows}" in options.profile.split(","):
            profile(replay.replay)

    def compose(self, rows: int) -> None:
        """Rows of two adapters each, and rows with one of their ranks together."""
        rank, count = self.options.rank, min(rows, self.options.adapters // 2)
        alone = self.adapters.of([2 * rank] * count)
        self.decode("composed/alone", rows, alone)
        parts = self.adapters.of([rank] * 2 * count)
        self.decode("composed/pairs", rows, parts, parts_a_row=2)

    def kinds(self, rows: int) -> None:
        """What rows of a kind cost the others of their step: plain adapters alone; with a rotation of its own in every
        second; with gains (DoRA) in every second.
        """
        rank, count = self.options.rank, min(rows, self.options.adapters)
        plain = self.adapters.of([rank] * count)
        self.decode("kinds/plain", rows, plain)
        kinds: tuple[Kind, ...] = ("rotated", "gains")
        for kind in kinds:
            half = [make_of_kind(self.loaded, i, rank, kind, self.options.context) for i in range((count + 1) // 2)]
            for adapter in half:
                self.adapters.put(adapter)
            mixed = [each for pair in zip(half, plain[1::2] or half, strict=False) for each in pair][:count]
            self.decode(f"kinds/{kind}", rows, mixed)
            for adapter in half:
                self.runner.drop_adapter(adapter.uid)

    def merge(self, rows: int) -> None:
        """Rows of one adapter beside the base model, with it in the weights, and the base model's; both ways there and
        back twice, and whether logits are the same bit for bit.
        """
        (adapter,) = self.adapters.of([self.options.rank])
        batch = self.batch(rows, [])
        fixed = StepBatch([replace(chunk, token_ids=[chunk.sequence_id]) for chunk in batch.chunks])
        before, merged = self.runner.logits(fixed), []
        self.decode("merged/beside", rows, [adapter])
        for _ in range(2):
            seconds, steps = self._timed(lambda: self.runner.merge_some(adapter.uid))
            merged.append(self.runner.logits(fixed))
            self.decode("merged/merged", rows, [])
            back_s, _ = self._timed(self.runner.restore_some)
            is_same = torch.equal(self.runner.logits(fixed), before)
            self.print(
                case="merged/ways", batch=rows, matrices=steps, there_s=seconds, back_s=back_s, same_base=is_same
            )
        self.decode("merged/base", rows, [])
        differs = not torch.equal(merged[0], before)
        self.print(case="merged/twice", batch=rows, same=torch.equal(*merged), differs_from_base=differs)

    def _timed(self, some: Callable[[], bool]) -> tuple[float, int]:
        """Seconds until all is done, and calls."""
        torch.cuda.synchronize()
        started, calls = time.perf_counter(), 1
        while not some():
            calls += 1
        torch.cuda.synchronize()
        return time.perf_counter() - started, calls

    def prefill(self, case: str, prompts: int, tokens: int, adapters: Sequence[HostAdapter]) -> None:
        options = self.options
        blocks = self.state_blocks + -(-tokens // options.block_size)
        chunks = [
            make_chunk(
                1000 + i,
                torch.randint(0, self.loaded.spec.vocab_size, (tokens,)).tolist(),
                0,
                self.blocks[i * blocks : (i + 1) * blocks],
                adapters[i % len(adapters)].uid if adapters else None,
            )
            for i in range(prompts)
        ]
        batch = StepBatch(chunks)
        self.runner.submit(batch).result()
        ms = time_events(lambda: self.runner.submit(batch), 5)
        rows = prompts * tokens
        flops = self.floor.prefill_flops(prompts, tokens)
        tflops = flops / ms / 1e9
        self.print(
            case=case, batch=prompts, context=tokens, adapters=len(adapters),
            rank=rank_of(adapters[0]) if adapters else 0, ms_per_step=ms, tokens_per_s=rows / ms * 1e3,
            floor_ms=flops / options.matrix_tflops / 1e9, fraction=tflops / options.matrix_tflops, tflops=tflops,
        )  # fmt: skip
        if f"{case}:{prompts}" in options.profile.split(","):
            profile(lambda: self.runner.submit(batch))

    def make_runner(self, *, num_kv: int, num_adapters: int, max_rows: int, warms_up: bool) -> DeviceModelRunner:
        """Another runner over the same weights."""
        options, spec = self.options, self.loaded.spec
        weights = read_decoder(self.loaded)
        assert weights is not None
        block_bytes = self.floor.token_bytes * options.block_size
        num_adapter = int(1.2 * num_adapters * make_adapter(self.loaded, 0, options.rank).size_bytes / block_bytes)
        cache = KvCache(
            spec.kv, num_blocks=num_kv + num_adapter, block_size=options.block_size, dtype=torch.bfloat16,
            device=self.loaded.device,
        )  # fmt: skip
        limits = DeviceLimits(
            max_rows=max_rows, max_sequences=max(self.batches), adapter_slots=max(1, num_adapters), max_rank=64
        )
        runner = DeviceModelRunner(self.loaded, weights, cache, limits, num_kv_blocks=num_kv)
        if not warms_up:
            return runner
        free = torch.cuda.mem_get_info()[0]
        started = time.perf_counter()
        graphs = runner.warm_up()
        self.print(
            case="warm-up", graphs=graphs, seconds=time.perf_counter() - started,
            gib=(free - torch.cuda.mem_get_info()[0]) / GIB,
        )  # fmt: skip
        return runner

    @torch.inference_mode(mode=False)  # threads of the engine write what is made here
    def traffic(self, cases: Sequence[str]) -> None:
        from bench import engine_traffic

        options = self.options
        store = engine_traffic.Store(self.loaded, options.rank)
        adapter = make_adapter(self.loaded, 0, options.rank)
        sizes: dict[str, Any] = {"slots": max(self.batches), "batch_tokens": 2048 + 64, "chunk_tokens": 2048}
        sizes["max_overtakes"] = 2 * max(self.batches)
        runner = self.make_runner(
            num_kv=12_000, num_adapters=options.adapters, max_rows=sizes["batch_tokens"], warms_up=True
        )
        sizes["device_bytes"] = options.adapters * runner.adapter_bytes(adapter)
        started = time.perf_counter()
        memory = HostMemory(engine_traffic.HOST_BYTES)
        self.print(case="pin", gib=engine_traffic.HOST_BYTES / GIB, seconds=time.perf_counter() - started)
        engine = engine_traffic.Traffic(self.loaded, runner, store, memory=memory, guesses=options.guesses, **sizes)
        freeze_started()  # as a worker does
        for case in cases:
            if case == "zipf-1000":
                engine_traffic.run_zipf(engine, self.print)
            elif case == "loads":
                engine_traffic.run_loads(self.loaded, store, self.print)
            elif case == "churn":
                engine_traffic.run_churn(engine, self.print)
            elif case == "chunk":
                engine_traffic.run_chunk(engine, self.print)
            elif case == "arrivals":
                engine_traffic.run_arrivals(engine, options.guesses, self.print)
            elif case == "constrained":
                engine_traffic.run_constrained(engine, self.loaded.spec.vocab_size, self.print)
            else:
                bare = self.make_runner(num_kv=12_000, num_adapters=0, max_rows=sizes["batch_tokens"], warms_up=False)
                plain = engine_traffic.Traffic(self.loaded, bare, store, memory=memory, **sizes)
                engine_traffic.run_base_only(plain, engine, self.print)
                plain.close()
        engine.close()
        store.close()

    def run(self) -> None:
        options = self.options
        traffic = [case for case in options.cases.split(",") if case in TRAFFIC]
        if traffic:
            self.traffic(traffic)
        for case in (case for case in options.cases.split(",") if case not in TRAFFIC):
            if case == "prefill":
                self.prefill("prefill-base", 16, 512, [])
                self.prefill("prefill-base", 1, 8192, [])
                self.prefill("prefill-distinct", 16, 512, self.adapters.of([options.rank] * 16))
                continue
            for rows in self.batches:
                if case == "decode-base":
                    self.decode(case, rows, [])
                elif case == "decode-one":
                    self.decode(case, rows, self.adapters.of([options.rank]))
                elif case == "decode-distinct":
                    self.decode(case, rows, self.adapters.of([options.rank] * min(rows, options.adapters)))
                elif case == "decode-composed":
                    self.compose(rows)
                elif case == "decode-kinds":
                    self.kinds(rows)
                elif case == "merged":
                    self.merge(rows)
                elif case == "mixed-rank":
                    count = min(rows, options.adapters)
                    self.decode(case, rows, self.adapters.of([MIXED_RANKS[i % 4] for i in range(count)]))
                else:
                    sys.exit(f"--cases: {case} is not one of the cases")


def time_events(call: Any, repetitions: int) -> float:
    """Median milliseconds of one call on the device."""
    for _ in range(2):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in events))


def profile(call: Any) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    call()
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:10]:
        total_us = event.self_device_time_total
        print(
            f"{total_us:9.1f} us {event.count:5d} x {total_us / event.count:8.2f} us  {event.key[:70]}", file=sys.stderr
        )


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(4)
    with torch.inference_mode():
        bench = Bench(options)
        bench.print(
            case="versions", torch=torch.__version__, triton=triton.__version__, transformers=transformers.__version__,
            device=torch.cuda.get_device_name(), date=datetime.date.today().isoformat(),
        )  # fmt: skip
        bench.run()
        if bench.group is not None:
            torch.cuda.synchronize()
            os._exit(0)  # in order, NCCL waits for the graphs


if __name__ == "__main__":
    main()
