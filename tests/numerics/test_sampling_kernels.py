"""The device's sampler against the CPU's: the same tokens on the same logits.

Runs in Triton's interpreter on the CPU (TRITON_INTERPRET=1) and, marked gpu, as compiled code, where the oracle is the
models/torch/sampler.py on the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from manylora_worker.kinds.api import ANY_TOKEN, Sampled, Sampling, SequenceChunk
from manylora_worker.models.torch import sampler as oracle

triton = pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.sampling import DeviceSampler, RowState, SamplingPlan  # noqa: E402
from manylora_worker.models.cuda.steps.sampler_rows import bars_on_device  # noqa: E402
from test_sampling_maths import functions  # noqa: E402

from tests.numerics.interpreter import DEVICES, INTERPRETED  # noqa: E402

pytestmark = pytest.mark.kernels

VOCAB = 700


class Rows:
    """Rows on both sides: the sampler of the device, and the chunks that say the same to the CPU's."""

    def __init__(
        self, samplings: Sequence[Sampling], device: str, *, vocab: int = VOCAB, seed: int = 0, **sizes: int
    ) -> None:
        rng = random.Random(seed)
        self.samplings = samplings
        self.device = device
        self.bars: list[list[tuple[int, int]]] = [[] for _ in samplings]
        self.masks: list[bytes | None] = [None for _ in samplings]
        self.choices = [rng.randrange(4) for _ in samplings]
        self.prompts = [[rng.randrange(vocab) for _ in range(rng.randrange(1, 30))] for _ in samplings]
        self.outputs = [[rng.randrange(vocab) for _ in range(rng.randrange(12))] * 2 for _ in samplings]
        self.sampler = DeviceSampler(
            len(samplings) + 3,
            vocab,
            torch.device(device),
            penalty_slots=len(samplings),
            **({"segment_tokens": 256} | sizes),
        )
        self.sampler.write_rows({row: self.state(row) for row in range(len(samplings))})
        for row, s in enumerate(samplings):
            if s.adjusts_logits:
                self.sampler.write_penalty_slot(row, s, self.prompts[row], self.outputs[row])

    def state(self, row: int) -> RowState:
        sampling = self.samplings[row]
        slot = row if sampling.adjusts_logits else -1
        return RowState(sampling, self.choices[row], len(self.outputs[row]), slot, self.masks[row] is not None)

    def chunk(self, row: int) -> SequenceChunk:
        return SequenceChunk(
            sequence_id=row, token_ids=[1], start_position=0, block_table=[0], adapter_uid=None, samples=True,
            sampling=self.samplings[row], choice=self.choices[row], output_index=len(self.outputs[row]),
            prompt_token_ids=self.prompts[row], output_token_ids=self.outputs[row], bars=self.known_bars(row),
            mask=self.masks[row],
        )  # fmt: skip

    def known_bars(self, row: int) -> list[tuple[int, int]]:
        """As one says it who knows the row's last token."""
        return [(token, ANY_TOKEN) for token, before in self.bars[row] if before in (ANY_TOKEN, self.pending(row))]

    def pending(self, row: int) -> int:
        return self.outputs[row][-1] if self.outputs[row] else 0

    def expected(self, logits: torch.Tensor) -> list[Sampled]:
        return oracle.sample(logits, [self.chunk(row) for row in range(len(self.samplings))])

    def check(self, logits: torch.Tensor, plan: SamplingPlan | None = None) -> None:
        """One step on both; then every row goes on with its token."""
        expected = self.expected(logits)
        before = logits.clone()
        poison(self.sampler)
        last = torch.tensor([self.pending(row) for row in range(len(expected))], device=self.device)
        bars = bars_on_device(self.bars, last)
        plan = plan or SamplingPlan.of(self.samplings, has_bars=bars is not None)
        drawn = self.sampler.sample(logits.to(self.device), plan, bars)
        assert torch.equal(logits, before) or logits.isnan().any()
        assert drawn.sound.tolist() == [s.error is None for s in expected]
        assert drawn.token_ids.tolist() == [s.token_id for s in expected]
        for row, s in enumerate(expected):
            self.outputs[row].append(s.token_id)


def poison(sampler: DeviceSampler) -> None:
    """Nothing may be read from a step before."""
    for tensor in vars(sampler._scratch).values():
        if tensor is not None:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1 if tensor.dtype is torch.bool else 12345)


def random_sampling(rng: random.Random, vocab: int = VOCAB) -> Sampling:
    def maybe(*values: Any) -> Any:
        return rng.choice(values)

    return Sampling(
        seed=rng.randrange(2**64),
        temperature=maybe(0.0, 1e-6, 0.3, 0.7, 1.0, 1.0, 2.5),
        top_k=maybe(0, 0, 1, 2, 20, 300, vocab - 1, vocab, vocab + 5),
        top_p=maybe(1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999, rng.random()),
        min_p=maybe(0.0, 0.0, 0.01, 0.2, 1.0),
        repetition_penalty=maybe(1.0, 1.0, 0.5, 1.7),
        presence_penalty=maybe(0.0, 0.0, 0.7, -1.1),
        frequency_penalty=maybe(0.0, 0.0, 0.4, -0.3),
        logit_bias=maybe({}, {}, {3: 5.0, rng.randrange(vocab): -2.5, 9: float("-inf")}),
        allowed_token_ids=maybe((), (), (3, 8, rng.randrange(vocab))),
    )


def random_logits(rng: random.Random, rows: int, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = torch.randn(rows, vocab, generator=generator) * rng.choice([0.01, 1.0, 3.0, 10.0])
    kind = rng.randrange(4)
    if kind == 0:
        logits = logits.round()  # many ties
    elif kind == 1:
        logits = logits.bfloat16().float()
    elif kind == 2:
        logits[:, rng.randrange(vocab)] = float("-inf")
    return logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(6))
def test_tokens_equal_the_cpus(seed: int, device: str) -> None:
    rng = random.Random(seed)
    rows = Rows([random_sampling(rng) for _ in range(8)], device, seed=seed)
    for _ in range(2):
        rows.check(random_logits(rng, 8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_bars_hold_always_or_after_the_pending_token(seed: int, device: str) -> None:
    rng = random.Random(seed)
    rows = Rows([random_sampling(rng) for _ in range(8)], device, seed=seed)
    logits = random_logits(rng, 8)
    for _ in range(3):
        likely = logits.topk(6, dim=-1).indices.tolist()
        for row in range(1, 8):  # one row has none
            before = [ANY_TOKEN, rows.pending(row), rows.pending(row) + 1]
            rows.bars[row] = [(token, rng.choice(before)) for token in likely[row] + likely[row][:2]]
        rows.check(logits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(2))
def test_more_candidates_than_room(seed: int, device: str) -> None:
    rng = random.Random(seed)
    samplings = [
        Sampling(
            seed=rng.randrange(2**64),
            temperature=2.0,
            top_k=rng.choice([0, 50, 400]),
            top_p=rng.choice([1.0, 0.8, 0.99]),
        )
        for _ in range(8)
    ]
    rows = Rows(samplings, device, candidates=32)
    rows.check(random_logits(rng, 8), SamplingPlan(draws=True, cuts=True))


@pytest.mark.parametrize("device", DEVICES)
def test_any_plan_that_covers_the_rows_will_do(device: str) -> None:
    rng = random.Random(0)
    samplings = [Sampling(seed=1, temperature=0.0), Sampling(seed=2, temperature=0.0)]
    rows = Rows(samplings, device)
    logits = random_logits(rng, 2)
    least = SamplingPlan.of(samplings)
    assert least == SamplingPlan()
    drawing = Rows([Sampling(seed=1), Sampling(seed=2, temperature=0.0)], device)
    for plan in (least, SamplingPlan(draws=True), SamplingPlan(True, True, True, 5)):
        assert plan.covers(least)
        rows.check(logits, plan)
        if plan.draws:
            assert not least.covers(plan)
            drawing.check(logits, plan)


def test_the_least_plan() -> None:
    greedy = Sampling(seed=0, temperature=0.0, top_k=5)
    assert SamplingPlan.of([greedy]) == SamplingPlan()
    assert SamplingPlan.of([greedy, Sampling(seed=0)]) == SamplingPlan(draws=True)
    assert SamplingPlan.of([Sampling(seed=0, top_k=3)]) == SamplingPlan(draws=True, cuts=True)
    assert SamplingPlan.of([Sampling(seed=0, temperature=0.0, logit_bias={1: 1.0})]) == SamplingPlan(penalties=True)
    assert SamplingPlan.of([greedy], has_bars=True) == SamplingPlan(penalties=True)
    assert SamplingPlan.of([greedy], has_masks=True) == SamplingPlan(masks=True)
    assert not SamplingPlan(penalties=True).covers(SamplingPlan(masks=True))
    assert SamplingPlan.of([greedy, Sampling(seed=0, top_logprobs=0)]) == SamplingPlan(draws=True, top_logprobs=0)
    assert not SamplingPlan(top_logprobs=None).covers(SamplingPlan(top_logprobs=0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_penalties", [False, True])
def test_masks_bar_what_they_do_not_name(device: str, has_penalties: bool) -> None:
    """Of some rows, beside others without; and the next step's masks are other ones."""
    rng = random.Random(7)
    vocab = 300
    samplings = [replace(random_sampling(rng, vocab), allowed_token_ids=()) for _ in range(12)]
    if not has_penalties:
        plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}}
        samplings = [replace(each, **plain) for each in samplings]
    rows = Rows(samplings, device, vocab=vocab)
    masked = range(0, 12, 2)
    for step in range(3):
        tokens = {row: {rng.randrange(vocab) for _ in range(1 + 40 * (row % 3))} for row in masked}
        for row in masked:
            rows.masks[row] = sum(1 << token for token in tokens[row]).to_bytes(-(-vocab // 32) * 4, "little")
        if step == 0:
            rows.sampler.write_rows({row: rows.state(row) for row in range(12)})
        rows.sampler.write_masks({row: rows.masks[row] or b"" for row in masked})
        plan = SamplingPlan.of(samplings, has_masks=True)
        assert plan.penalties == has_penalties
        rows.check(random_scores(vocab, 3.0).expand(12, -1).contiguous(), plan)
        assert all(rows.outputs[row][-1] in tokens[row] for row in masked)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "cut",
    [{"top_k": 1}, {"top_k": 2}, {"top_k": 5}, {"top_p": 2.5 / 300}, {"top_p": 4.5 / 300}, {"top_p": 0.9, "top_k": 3}],
    ids=str,
)
def test_one_token_more_or_less_would_show(cut: dict[str, Any], device: str) -> None:
    """Nearly equal scores: whatever passes the cut is drawn by some of the rows."""
    vocab = 300
    rows = Rows([Sampling(seed=i, **cut) for i in range(16)], device, vocab=vocab)
    rows.check(random_scores(vocab, 0.001).expand(16, -1).contiguous())


def random_scores(vocab: int, scale: float) -> torch.Tensor:
    return torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)) * scale


@pytest.mark.parametrize("device", DEVICES)
def test_ties_at_the_cuts_edge(device: str) -> None:
    """Tied scores stay or go together, by top-k and by min-p that equals their probability exactly."""
    vocab = 64
    levels = torch.tensor([0.0, -1.0, -1.0, -2.0] * (vocab // 4))
    levels[levels == -1.0] = torch.tensor(0.5).log()
    for cut in ({"top_k": 17}, {"top_k": 16}, {"min_p": 0.5}, {"min_p": 0.50001}):
        rows = Rows([Sampling(seed=i, **cut) for i in range(16)], device, vocab=vocab)
        rows.check(levels.expand(16, -1).contiguous())


@pytest.mark.parametrize("device", DEVICES)
def test_a_sum_that_meets_top_p_exactly(device: str) -> None:
    """Some tokens at the best score, the others at one below, and a limit of just those tokens' mass."""
    below = -torch.arange(1, 1025) / 64.0
    device_exps = functions(-below / 90.0, device)[0]
    same = [x for x, e in zip(below.tolist(), device_exps.tolist(), strict=True) if e == torch.tensor(x).exp().item()]
    vocab, tried = 16, 0
    for x in same:
        first = 1 + tried % 8
        total = first + (vocab - first) * torch.tensor(x).exp().double().item()
        top_p = first / total
        if top_p * total == first and x > -2 and top_p < 0.8 and tried < 3:
            tried += 1
            logits = torch.full((12, vocab), x)
            logits[:, :first] = 0
            for nudge in (0.0, 1e-9):
                rows = Rows([Sampling(seed=i, top_p=top_p + nudge) for i in range(12)], device, vocab=vocab)
                rows.check(logits)
    assert tried == 3


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_not_finite_fail_alone(device: str) -> None:
    rng = random.Random(3)
    samplings = [Sampling(seed=i, temperature=float(i % 2), top_p=0.9, top_k=i % 3 * 10) for i in range(10)]
    logits = random_logits(rng, 10).clamp(min=-30)
    logits[2, 500] = float("nan")
    logits[3, 7] = float("nan")
    logits[4, 3] = float("inf")
    logits[5, :] = float("-inf")
    logits[6, 4] = float("-inf")
    Rows(samplings, device).check(logits)
    Rows([Sampling(seed=i, temperature=float(i % 2)) for i in range(10)], device).check(logits)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value)")  # the interpreter's numpy
@pytest.mark.parametrize("device", DEVICES)
def test_a_callers_values_are_no_fault_of_the_model(device: str) -> None:
    """And no penalty, bias or bar hides a fault that is the model's."""
    rng = random.Random(5)
    tokens = range(VOCAB)
    extreme = [
        *(Sampling(seed=i, temperature=t, top_p=p, repetition_penalty=1e-38) for i, t, p in ((0, 0, 1), (1, 1, 0.5))),
        Sampling(seed=2, repetition_penalty=1e-38),
        *(Sampling(seed=3, temperature=t, logit_bias=dict.fromkeys(tokens, float("-inf"))) for t in (0.0, 1.0)),
        Sampling(seed=4, presence_penalty=2.0),
        Sampling(seed=5, logit_bias={600: float("-inf")}),
        Sampling(seed=6, temperature=0.0, repetition_penalty=2.0),
    ]
    logits = random_logits(rng, len(extreme)).clamp(min=-30)
    logits[:3, 7] = 3e38
    logits[5, 500] = float("nan")
    logits[6, 600] = float("inf")
    logits[7, :] = float("-inf")
    rows = Rows(extreme, device)
    for row, sampling in enumerate(extreme):
        rows.prompts[row] = [7, 8]
        rows.sampler.write_penalty_slot(row, sampling, rows.prompts[row], rows.outputs[row])
    assert [s.error is None for s in rows.expected(logits)] == [True] * 5 + [False] * 3
    rows.check(logits)
    barred = Rows([Sampling(seed=i, temperature=float(i % 2)) for i in range(4)], device)
    barred.bars = [[(token, ANY_TOKEN) for token in tokens]] * 2 + [[(600, ANY_TOKEN)]] * 2
    logits = random_logits(rng, 4)
    logits[2, 600] = float("inf")
    barred.check(logits)


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs(device: str) -> None:
    samplings = [Sampling(seed=1, top_logprobs=4, repetition_penalty=2.0), Sampling(seed=2, top_logprobs=0, top_k=4)]
    rows = Rows(samplings, device)
    logits = random_logits(random.Random(7), 2)
    expected = rows.expected(logits)
    drawn = rows.sampler.sample(logits.to(device), SamplingPlan.of(samplings))
    assert drawn.logprobs is not None
    assert drawn.top_ids is not None
    assert drawn.top_values is not None
    for row, s in enumerate(expected):
        assert s.logprobs is not None
        assert drawn.token_ids[row].item() == s.token_id
        assert drawn.logprobs[row].item() == pytest.approx(s.logprobs.logprob, abs=1e-5)
        for i, (token, value) in enumerate(s.logprobs.top):
            assert drawn.top_ids[row, i].item() == token
            assert drawn.top_values[row, i].item() == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_its_place(device: str) -> None:
    rng = random.Random(9)
    samplings = [random_sampling(rng) for _ in range(6)]
    logits = random_logits(rng, 1).expand(6, -1).contiguous()
    rows = Rows(samplings, device)
    first = rows.sampler.sample(logits.to(device), SamplingPlan(True, True, True)).token_ids.tolist()
    again = Rows(samplings, device)
    states = {5 - row: again.state(row) for row in range(6)}
    again.sampler.write_rows(states)  # slots stay with their rows
    turned = again.sampler.sample(logits.to(device), SamplingPlan(True, True, True)).token_ids.tolist()
    assert turned[::-1] == first


@pytest.mark.gpu
def test_in_a_graph_at_full_size() -> None:
    if INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set")
    vocab = 128_256
    rng = random.Random(1)
    samplings = [random_sampling(rng, vocab) for _ in range(32)]
    rows = Rows(samplings, "cuda", vocab=vocab, segment_tokens=4096)
    plan = SamplingPlan(True, True, True, None)
    logits = random_logits(rng, 32, vocab)
    static = logits.cuda()
    rows.check(logits, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = rows.sampler.sample(static, plan)
    for _ in range(5):
        logits = random_logits(rng, 32, vocab)
        static.copy_(logits)
        expected = rows.expected(logits)
        graph.replay()
        assert drawn.token_ids.tolist() == [s.token_id for s in expected]
        for row, s in enumerate(expected):
            rows.outputs[row].append(s.token_id)
