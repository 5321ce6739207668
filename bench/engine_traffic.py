"""Cases of bench/engine.py that are traffic: through EngineCore, the adapter cache and its threads, as in a worker.

    zipf-1000    512 requests at once, 128 tokens in and 128 out; adapters by Zipf(1) from 1,000, room on the device for
                 64. Thrice: all on one adapter; the host tier empty and the files in the page cache; the host tier warm
    loads        loads from the page cache into the host tier, with nothing beside them: one at a time, eight at a time
    churn        a steady decode of 32 rows with an adapter each, alone and beside 100 adapter loads a second
    chunk        64 rows decode while prompts of 2,048 tokens arrive, one after the other, each one chunk
    base-only    rows without adapters, on an engine without LoRA and on one with 64 adapters on the device
    arrivals     2,000 requests, 60 a second, of 8 tenants' 1,000 adapters by Zipf(1), of which the host holds some 300;
                 with --guesses adapters that a tenant may ask for next are loaded meanwhile (a worker's --prefetch)
    constrained  64 rows with an adapter each that draw freely, and 64 that draw inside a JSON schema, by turns

The adapters are real files with real digests. Their weights are a few files' that share their bytes (hard links); the
configurations differ, so each adapter is read, checked, packed and copied for itself.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME, adapter_digest
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.constraints.compiler import ConstraintCompiler, Vocabulary
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import AdapterTier, EngineRequest, Sampling
from manylora_worker.kinds.constraint import CompiledConstraint
from manylora_worker.models.cuda.runner import DeviceModelRunner
from manylora_worker.models.loader import LoadedModel
from manylora_worker.planning.step_planner import PlannerLimits
from manylora_worker.weights.backend import TorchAdapterBackend
from manylora_worker.weights.host_memory import HostMemory
from manylora_worker.weights.reader_pool import ReaderProcesses
from manylora_worker.weights.source import AdapterLimits
from manylora_worker.weights.store import FolderStore
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel

GIB = 1 << 30
HOST_BYTES = 26 * GIB
WEIGHT_FILES = 16
ADAPTERS = 1000


class Store:
    """An adapter store in a temporary folder, whose adapters are made when they are asked for."""

    def __init__(self, loaded: LoadedModel, rank: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="manylora-bench-"))
        self.objects = self._folder / "objects"
        self.objects.mkdir()
        self._name = loaded.spec.name
        self._rank = rank
        self._uids: dict[int, AdapterUid] = {}
        for i in range(WEIGHT_FILES):
            generator = torch.Generator("cuda").manual_seed(i)
            tensors = {}
            for site, slot in ((each, slot) for each in loaded.sites for slot in each.slots):
                for matrix, shape in (("A", (rank, site.in_features)), ("B", (slot.stop - slot.start, rank))):
                    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
                    tensors[f"base_model.model.{slot.path}.lora_{matrix}.weight"] = values.mul_(0.02).cpu()
            save_file(tensors, self._weights(i))

    def _weights(self, index: int) -> Path:
        return self._folder / f"{index}.safetensors"

    def make(self, indices: Sequence[int]) -> list[AdapterUid]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._make, sorted({i for i in indices if i not in self._uids})))
        return [self._uids[i] for i in indices]

    def _make(self, index: int) -> None:
        weights = self._weights(index % WEIGHT_FILES)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._name,
            "r": self._rank,
            "lora_alpha": 2 * self._rank,
            "lora_dropout": index / 10_000,  # says nothing about inference, and makes another adapter of it
            "target_modules": "all-linear",
        }
        uid = AdapterUid(adapter_digest(config, weights))
        folder = self.objects / uid
        folder.mkdir()
        (folder / CONFIG_NAME).write_text(json.dumps(config))
        os.link(weights, folder / WEIGHTS_NAME)
        self._uids[index] = uid

    def close(self) -> None:
        shutil.rmtree(self._folder)


class Traffic:
    """One engine over a runner; `device_adapters` of a rank have room on the device."""

    def __init__(
        self,
        loaded: LoadedModel,
        runner: DeviceModelRunner,
        store: Store,
        *,
        slots: int,
        batch_tokens: int,
        chunk_tokens: int,
        device_bytes: int,
        max_overtakes: int,
        memory: HostMemory,
        guesses: bool = False,
    ) -> None:
        self.store = store
        reader = ReaderProcesses(loaded.adapter_base(), AdapterLimits(max_rank=64), memory)
        self.backend = TorchAdapterBackend(FolderStore(store.objects.parent), reader, runner, host_threads=8)
        limits = EngineLimits(
            PlannerLimits(batch_tokens, chunk_tokens, slots),
            AdapterCacheLimits(
                host_bytes=HOST_BYTES, device_bytes=device_bytes, max_overtakes=max_overtakes
            ),
            max_requests=4096,
            guesses=guesses,
        )  # fmt: skip
        self.core = EngineCore(runner, self.backend, limits)
        self.added: dict[RequestId, float] = {}
        self.first: dict[RequestId, float] = {}
        self.tokens = 0
        self.ended = 0
        self._serial = 0
        self.now = time.perf_counter
        self.phases = dict.fromkeys(("begin", "submit", "wait", "end"), 0.0)

    def add(
        self,
        prompt_tokens: int,
        max_tokens: int,
        adapter_uid: AdapterUid | None,
        *,
        temperature: float = 0.0,
        constraint: CompiledConstraint | None = None,
        tenant: TenantId | None = None,
    ) -> RequestId:
        self._serial += 1
        request_id = RequestId(f"r{self._serial}")
        rng = random.Random(self._serial)
        prompt = tuple(rng.randrange(1000, 30000) for _ in range(prompt_tokens))
        sampling = Sampling(seed=self._serial, temperature=temperature)
        now = self.now()
        self.core.add(
            EngineRequest(
                request_id, tenant or tenant_of(self._serial), QosClass.STANDARD, adapter_uid, prompt, max_tokens,
                sampling, constraint=constraint,
            ),
            now,
        )  # fmt: skip
        self.added[request_id] = now
        return request_id

    def turn(self) -> bool:
        """As ThreadRuntime's: whether a step was begun or ended."""
        core, phases, now = self.core, self.phases, self.now
        started = now()
        batch = core.begin_step(started)
        begun = now()
        phases["begin"] += begun - started
        if batch is not None:
            core.submit(batch, begun)
        submitted = now()
        phases["submit"] += submitted - begun
        if not (core.must_wait or (batch is None and core.num_in_flight)):
            return batch is not None
        result = core.wait()
        waited = now()
        core.end_step(result, waited)
        if isinstance(result, Exception):
            raise result
        for output in core.take_outputs():
            self.first.setdefault(output.request_id, waited)
            self.tokens += len(output.token_ids)
        self.ended += len(core.take_ended())
        phases["wait"] += waited - submitted
        phases["end"] += now() - waited
        return True

    def drain(self) -> None:
        while self.core.has_work():
            if not self.turn():
                time.sleep(0.0005)

    def run(self, requests: Sequence[AdapterUid | None], prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
        """All at once, until the last has ended."""
        torch.cuda.synchronize()
        self.tokens, steps, self.phases = 0, self.core.stats().steps, dict.fromkeys(self.phases, 0.0)
        started = self.now()
        ids = [self.add(prompt_tokens, max_tokens, uid) for uid in requests]
        self.drain()
        seconds = self.now() - started
        assert self.tokens == len(requests) * max_tokens
        waits = sorted(self.first[request_id] - self.added[request_id] for request_id in ids)
        return {
            "requests": len(requests),
            "adapters": len({uid for uid in requests if uid is not None}),
            "seconds": seconds,
            "tokens_per_s": self.tokens / seconds,
            "steps": self.core.stats().steps - steps,
            "ttft_p50_s": waits[len(waits) // 2],
            "ttft_p99_s": waits[int(len(waits) * 0.99)],
            **{f"{name}_s": spent for name, spent in self.phases.items()},
        }

    def close(self) -> None:
        self.backend.close()


def tenant_of(index: int) -> TenantId:
    return TenantId(f"t{index % 8}")


def zipf(count: int, num_adapters: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(num_adapters)]
    return rng.choices(range(num_adapters), weights, k=count)


def run_loads(loaded: LoadedModel, store: Store, emit: Callable[..., None]) -> None:
    """By readers and into memory of its own: the first round pays for the readers' start and for mapping the memory."""
    uids = store.make(range(2000, 2064))
    file_bytes = (store.objects / uids[0] / WEIGHTS_NAME).stat().st_size
    reader = ReaderProcesses(loaded.adapter_base(), AdapterLimits(max_rank=64), HostMemory(len(uids) * file_bytes))
    for name, at_once in (("first", 8), ("one", 1), ("eight", 8)):
        started = time.perf_counter()
        with ThreadPoolExecutor(at_once) as threads:
            adapters = list(threads.map(lambda uid: reader.read(store.objects / uid, uid), uids))
        seconds = time.perf_counter() - started
        emit(case=f"loads/{name}", batch=at_once, loads=len(uids), loads_per_s=len(uids) / seconds)
        for adapter in adapters:
            reader.free(adapter)
    reader.close()


def run_zipf(traffic: Traffic, emit: Callable[..., None]) -> None:
    drawn = zipf(512, ADAPTERS)
    started = time.perf_counter()
    uids = traffic.store.make(drawn)
    (one,) = traffic.store.make([ADAPTERS + 1])
    emit(case="zipf-1000/files", seconds=time.perf_counter() - started)
    traffic.run([one] * 512, 128, 128)  # loads it, and warms up what is left
    base = traffic.run([one] * 512, 128, 128)
    emit(case="zipf-1000/one", **base)
    for name in ("cold", "warm"):
        found = traffic.run(uids, 128, 128)
        ratios = {
            "fraction_of_one": found["tokens_per_s"] / base["tokens_per_s"],
            "ttft_p99_ratio": found["ttft_p99_s"] / base["ttft_p99_s"],
        }
        emit(case=f"zipf-1000/{name}", **found, **ratios)


def run_arrivals(traffic: Traffic, guesses: bool, emit: Callable[..., None], *, per_second: float = 60.0) -> None:
    drawn = zipf(2000, ADAPTERS, seed=1)
    uids = traffic.store.make(drawn)
    traffic.run(uids[:8], 128, 8)  # warms up what is left
    rng, at, arrivals = random.Random(2), traffic.now(), []
    for index, uid in zip(drawn, uids, strict=True):
        at += rng.expovariate(per_second)
        arrivals.append((at, index, uid))
    arrivals.reverse()
    late: dict[RequestId, float] = {}
    while arrivals or traffic.core.has_work():
        while arrivals and arrivals[-1][0] <= traffic.now():
            due, index, uid = arrivals.pop()
            late[traffic.add(128, 32, uid, tenant=tenant_of(index))] = due
        if not traffic.turn():
            time.sleep(0.0005)
    waits = sorted(1e3 * (traffic.first[request_id] - due) for request_id, due in late.items())
    found = {f"ttft_p{part}_ms": waits[len(waits) * part // 100] for part in (50, 95, 99)}
    emit(case="arrivals", guesses=guesses, requests=len(waits), adapters=len(set(drawn)), **found)


def step_times(traffic: Traffic, seconds: float, beside: Iterator[None] | None = None) -> list[float]:
    """Milliseconds between the ends of steps; `beside` is advanced before each turn."""
    times = []
    until = traffic.now() + seconds
    last = None
    while traffic.now() < until:
        if beside is not None:
            next(beside)
        steps = traffic.core.stats().steps
        traffic.turn()
        if traffic.core.stats().steps > steps:
            now = traffic.now()
            if last is not None:
                times.append((now - last) * 1e3)
            last = now
    return times


def spread(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "p50_ms": statistics.median(ordered),
        "p99_ms": ordered[int(len(ordered) * 0.99)],
        "longest_ms": ordered[-1],
        "steps": len(ordered),
    }


def steady(traffic: Traffic, uids: Sequence[AdapterUid | None], max_tokens: int) -> list[RequestId]:
    """Requests that decode, all of them, when this returns."""
    ids = [traffic.add(128, max_tokens, uid) for uid in uids]
    while not all(request_id in traffic.first for request_id in ids):
        if not traffic.turn():
            time.sleep(0.0005)
    for _ in range(20):
        traffic.turn()
    return ids


def stop(traffic: Traffic, ids: Sequence[RequestId]) -> None:
    for request_id in ids:
        traffic.core.abort(request_id, traffic.now())
    traffic.drain()


def run_churn(traffic: Traffic, emit: Callable[..., None], *, seconds: float = 6.0, per_second: int = 100) -> None:
    rows = traffic.store.make(range(32))
    others = traffic.store.make(range(32, 232))
    tenants = [tenant_of(i) for i in range(len(others))]
    for uid, tenant in zip(others, tenants, strict=True):  # the host tier is warm
        traffic.core.prefetch(uid, tenant)
        while traffic.core.adapter_tiers().get(uid) is None:
            traffic.core.begin_step(traffic.now())
            time.sleep(0.0005)
    traffic.drain()
    ids = steady(traffic, rows, 4000)
    alone = spread(step_times(traffic, seconds))
    emit(case="churn/alone", batch=len(ids), **alone)
    stop(traffic, ids)
    ids = steady(traffic, rows, 4000)  # anew, so that contexts are as long as they were

    def load() -> Iterator[None]:
        started, asked = traffic.now(), 0
        while True:
            while asked < (traffic.now() - started) * per_second:
                traffic.core.prefetch(others[asked % len(others)], tenants[asked % len(others)])
                asked += 1
            yield

    count = traffic.core.stats().adapter_version
    beside = spread(step_times(traffic, seconds, load()))
    loads = (traffic.core.stats().adapter_version - count) // 2  # one in, one out
    emit(
        case="churn/loads", batch=len(ids), loads_per_s=loads / seconds, **beside,
        p99_ratio=beside["p99_ms"] / alone["p99_ms"], p50_ratio=beside["p50_ms"] / alone["p50_ms"],
    )  # fmt: skip
    stop(traffic, ids)


def run_chunk(traffic: Traffic, emit: Callable[..., None]) -> None:
    ids = steady(traffic, [None] * 64, 3000)
    alone = spread(step_times(traffic, 1.0))
    prompts: list[RequestId] = []

    def arrive() -> Iterator[None]:
        while True:
            if not prompts or prompts[-1] in traffic.first:
                prompts.append(traffic.add(2048, 2, None))
            yield

    beside = spread(step_times(traffic, 3.0, arrive()))
    emit(case="chunk-2048", batch=len(ids), prompts=len(prompts), alone_p50_ms=alone["p50_ms"], **beside)
    stop(traffic, ids)


def run_constrained(traffic: Traffic, vocab_size: int, emit: Callable[..., None], *, seconds: float = 4.0) -> None:
    compiler = ConstraintCompiler(lambda: make_vocabulary(vocab_size), lambda: None)
    compiled = [compiler.compile(tenant_of(i), LISTS).result() for i in range(8)]
    uids = traffic.store.make(range(64))
    rates: dict[str, list[float]] = {"free": [], "constrained": []}
    phases: dict[str, dict[str, float]] = {}  # milliseconds a step
    for turn in range(4):  # the first warms up
        for name, found in rates.items():
            ids = [
                traffic.add(
                    128, 4000, uid, temperature=1.0, constraint=compiled[i % 8] if name == "constrained" else None
                )
                for i, uid in enumerate(uids)
            ]
            while not all(request_id in traffic.first for request_id in ids):
                if not traffic.turn():
                    time.sleep(0.0005)
            tokens, steps, started = traffic.tokens, traffic.core.stats().steps, traffic.now()
            traffic.phases = dict.fromkeys(traffic.phases, 0.0)
            while traffic.now() < started + seconds:
                traffic.turn()
            steps = traffic.core.stats().steps - steps
            phases[name] = {phase: 1e3 * spent / steps for phase, spent in traffic.phases.items()}
            phases[name]["rows"] = (traffic.tokens - tokens) / steps
            if turn:
                found.append((traffic.tokens - tokens) / (traffic.now() - started))
            stop(traffic, ids)
    free, constrained = (statistics.median(found) for found in rates.values())
    emit(
        case="constrained", batch=64, vocab_size=vocab_size, free_tokens_per_s=free,
        constrained_tokens_per_s=constrained, ratio=constrained / free, all=rates,
        phases_ms=phases,
    )  # fmt: skip
    compiler.close()


# More than any of these rows writes: each object a name, a number, some tags of a few, and whether it is so.
LISTS = Constraint(
    ConstraintKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "array",
            "minItems": 1000,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "count": {"type": "integer", "minimum": 0, "maximum": 9999},
                    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
                    "is_new": {"type": "boolean"},
                },
                "required": ["name", "count", "tags", "is_new"],
                "additionalProperties": False,
            },
        }
    ),
)


def make_vocabulary(size: int) -> Vocabulary:
    """Byte-level, as wide as the model's: all bytes, and words that nobody has learnt."""
    rng = random.Random(0)
    words = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    marks = ['",', '":', '{"', '"}', '["', '"]', "},", "[{", "true", "false", "red", "green", "blue"]
    for mark in marks:
        words.setdefault(mark, len(words))
    while len(words) < size - 1:
        letters = "".join(rng.choices(string.ascii_letters, k=rng.randint(2, 10)))
        words.setdefault(rng.choice(("", "Ġ")) + letters, len(words))
    end = {
        "id": size - 1, "content": "<|end|>", "special": True,
        "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
    }  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": words, "merges": [],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    return Vocabulary(json.dumps(tokenizer), size, [size - 1])


def run_base_only(plain: Traffic, lora: Traffic, emit: Callable[..., None]) -> None:
    """Alternating, so that a slow moment hits both."""
    uids = lora.store.make(range(64))
    for uid in uids:
        lora.core.prefetch(uid)
        while lora.core.adapter_tiers().get(uid) is not AdapterTier.DEVICE:
            lora.core.begin_step(lora.now())
            time.sleep(0.0005)
    for rows in (1, 64):
        found: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(3):
            for name, traffic in (("without", plain), ("with", lora)):
                ids = steady(traffic, [None] * rows, 4000)
                found[name] += step_times(traffic, 0.7)
                stop(traffic, ids)
        without, with_lora = statistics.median(found["without"]), statistics.median(found["with"])
        emit(case="base-only", batch=rows, without_ms=without, with_lora_ms=with_lora, ratio=with_lora / without)
