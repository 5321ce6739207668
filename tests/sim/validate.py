"""What must be true of every call, and of the cluster at rest."""

from __future__ import annotations

from collections.abc import Sequence

from manylora.v1 import common_pb2
from manylora_router.app import RouterApp
from manylora_scheduler.app import SchedulerApp
from manylora_scheduler.core.request import FlowKey
from manylora_shared.errors import Code, RpcError
from manylora_shared.ids import QosClass, TenantId
from manylora_worker.app import WorkerApp
from manylora_worker.hosting.view import MAX_PAUSE_S

from tests.sim import books
from tests.sim.cluster import BROKEN_ADAPTER, LEAVING_ADAPTER, NUM_BLOCKS, TENANTS, Cluster, Engine
from tests.sim.traffic import Call

_CODES = {
    common_pb2.OUTCOME_COMPLETED: None,
    common_pb2.OUTCOME_DEADLINE_EXCEEDED: Code.DEADLINE_EXCEEDED,
    common_pb2.OUTCOME_WORKER_LOST: Code.UNAVAILABLE,
    common_pb2.OUTCOME_ADAPTER_FAILED: Code.FAILED_PRECONDITION,
    common_pb2.OUTCOME_ADAPTER_UNAVAILABLE: Code.UNAVAILABLE,
    common_pb2.OUTCOME_QUOTA_EXHAUSTED: Code.RESOURCE_EXHAUSTED,
    common_pb2.OUTCOME_SLOW_READER: Code.RESOURCE_EXHAUSTED,
}
"""Outcomes that a caller may see here, each with the status that follows; OUTCOME_INTERNAL is always a bug."""
_LOST_CALLS = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
"""How a call may end without a terminal frame: its router went, or its deadline passed on the way."""
_REFUSALS = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED)


def check_calls(cluster: Cluster, calls: Sequence[Call]) -> None:
    for call in calls:
        check_call(call)
        is_cut = call.finished is not None and call.finished.outcome == common_pb2.OUTCOME_QUOTA_EXHAUSTED
        assert not is_cut or call.tenant in cluster.bounded_tenants, f"cut without a quota: {call.describe()}"
        if call.is_after_heal and call.adapter == LEAVING_ADAPTER:
            assert call.error is not None, call.describe()
            assert call.error.code is Code.NOT_FOUND, call.describe()
        elif call.is_after_heal and not _is_quarantined(call):
            assert call.finished is not None, call.describe()
            assert call.finished.outcome == common_pb2.OUTCOME_COMPLETED, call.describe()
    books.check_meter(cluster, calls)
    books.check_ledger(cluster, calls)
    books.check_cached(cluster, calls)


def _is_quarantined(call: Call) -> bool:
    """Refused for a prompt (they are short here) that was in flight when workers were killed twice."""
    return call.error is not None and call.error.label == "quarantined" and not call.frames


def check_call(call: Call) -> None:
    """One call's frames and end, by the contract of inference.proto."""
    who = call.describe()
    assert [f.frame for f in call.frames] == list(range(len(call.frames))), f"frames are not dense: {who}"
    parts = ("started", "delta", "finished")
    assert all(any(f.HasField(part) for part in parts) for f in call.frames), f"a frame tells nothing: {who}"
    assert not any(f.HasField("finished") for f in call.frames[:-1]), f"frames after the terminal one: {who}"
    assert not any(f.HasField("started") for f in call.frames[1:]), f"started twice: {who}"
    for choice in range(call.n):
        _check_choice(call, choice)
    finished = call.finished
    if finished is not None:
        assert finished.outcome in _CODES, f"unexpected outcome: {who}"
        is_slow = call.longest_pause_s >= MAX_PAUSE_S
        assert finished.outcome != common_pb2.OUTCOME_SLOW_READER or is_slow, f"cut off, and it had read on: {who}"
        delivered = sum(len(call.tokens_of(choice)) for choice in range(call.n))
        assert finished.usage.completion_tokens == delivered, f"usage is not what was delivered: {who}"
        prompt = len(call.prompt) if call.frames[0].HasField("started") else 0
        told = finished.usage.prompt_tokens
        assert told == prompt or (told < prompt and finished.outcome in _TOLD_BY_WORKERS), (
            f"{finished.usage.prompt_tokens} prompt tokens are metered: {who}"
        )
        code = call.error.code if call.error is not None else None
        if not call.is_cancelled:
            unlucky = code is Code.UNAVAILABLE or (call.timeout_s is not None and code is Code.DEADLINE_EXCEEDED)
            assert code is _CODES[finished.outcome] or unlucky, f"status and outcome differ: {who}"
        if finished.outcome == common_pb2.OUTCOME_COMPLETED:
            _check_complete(call)
        if finished.outcome == common_pb2.OUTCOME_WORKER_LOST and code is Code.UNAVAILABLE:
            assert call.error is not None
            reason = call.error.message
            assert any(words in reason for words in _WHY_NOT_RESUMED), f"given up without a reason: {who}"
        assert (finished.outcome == common_pb2.OUTCOME_ADAPTER_FAILED) == (
            call.adapter == BROKEN_ADAPTER and finished.outcome not in _BEFORE_THE_ADAPTER
        ), who
    elif call.is_cancelled:
        return
    else:
        assert call.error is not None, f"ended well without a terminal frame: {who}"
        expected = _LOST_CALLS if call.frames else _REFUSALS
        assert call.error.code in expected or _is_quarantined(call), who
        if not call.frames:
            _check_refusal(call.error, who)
    if call.tenant not in TENANTS or call.adapter == "unknown":
        assert not call.frames, who


def _check_refusal(error: RpcError, who: str) -> None:
    """It says why, and when to try again where that helps: where the cluster or a quota is what refuses."""
    assert error.message, f"refused without a reason: {who}"
    is_networks = error.message in _NETWORKS_WORDS or error.message.startswith("cannot connect")
    if error.code is Code.RESOURCE_EXHAUSTED or (error.code is Code.UNAVAILABLE and not is_networks):
        assert error.retry_after_s is not None, f"refused without a hint: {who}"
        assert 0 < error.retry_after_s <= MAX_HINT_S, f"a hint of {error.retry_after_s} s: {who}"
    else:
        assert error.retry_after_s is None, f"trying again does not help: {who}"


_NETWORKS_WORDS = ("the connection was lost", "the connection was reset", "ping timeout", "the server stopped")
"""What a caller hears where no service could answer."""
MAX_HINT_S = 60.0
_TOLD_BY_WORKERS = (
    common_pb2.OUTCOME_ADAPTER_FAILED,
    common_pb2.OUTCOME_SLOW_READER,
    common_pb2.OUTCOME_WORKER_LOST,
    common_pb2.OUTCOME_INTERNAL,
)
"""Then its usage is as much of the prompt as was computed."""
_WHY_NOT_RESUMED = (
    *_NETWORKS_WORDS,  # the router's own stream broke behind the frame
    "attempts on workers",
    "no other worker goes on with it: ",
    "quotas.resumes_per_s: ",
)
"""What a lost answer's error says, for another worker goes on with it otherwise."""
_BEFORE_THE_ADAPTER = (common_pb2.OUTCOME_DEADLINE_EXCEEDED, common_pb2.OUTCOME_WORKER_LOST)


def is_cut_by_deadline(call: Call) -> bool:
    """It was told by its router, and not by the caller's own clock alone."""
    return call.finished is not None and call.finished.outcome == common_pb2.OUTCOME_DEADLINE_EXCEEDED


def check_contract(calls: Sequence[Call], *, rate: int, burst: int, since: float) -> int:
    """What the callers of one flow got never passes burst + rate * t. Returns how much it was in all."""
    total = 0
    for at, tokens in deliveries(calls):
        total += tokens
        assert total <= burst + rate * (at - since), f"at {at:.3f} s the flow had {total} tokens"
    return total


def check_windows(calls: Sequence[Call], leased: Sequence[tuple[float, int]], *, rate: int, burst: int) -> None:
    """A window that begins at one of the moments of `leased` (when, tokens in leases then) sees at most
    burst + rate * length + those tokens."""
    given = deliveries(calls)
    total, least, moments = 0, float("inf"), list(leased)
    for at, tokens in given:
        while moments and moments[0][0] < at:
            when, outstanding = moments.pop(0)
            least = min(least, total - rate * when + outstanding)
        total += tokens
        over = total - rate * at - least - burst
        assert over <= 0, f"a window that ends at {at:.3f} s saw {over:.1f} tokens too many"


def deliveries(calls: Sequence[Call]) -> list[tuple[float, int]]:
    """When callers got how many tokens, in order of time: what was computed of prompts included, with their first
    frame, less what was cached of them. Where the end was not seen, or a deadline came before the worker's word, nobody
    told how much that is, and it counts nothing."""
    got: list[tuple[float, int]] = []
    for call in calls:
        is_told = call.finished is not None and not is_cut_by_deadline(call)
        usage = call.finished.usage if is_told else common_pb2.Usage()
        prompt = usage.prompt_tokens - usage.cached_prompt_tokens
        for at, frame in zip(call.frame_times, call.frames, strict=True):
            tokens = prompt * frame.HasField("started") + len(frame.delta.token_ids)
            got.append((at, tokens))
    return sorted(got)


def _check_choice(call: Call, choice: int) -> None:
    position = 0
    for frame in call.frames:
        if frame.HasField("delta") and frame.delta.choice == choice:
            assert frame.delta.first_position == position, f"positions of choice {choice}: {call.describe()}"
            position += len(frame.delta.token_ids)
    tokens = call.tokens_of(choice)
    if tokens:
        assert tokens == call.reference(choice)[: len(tokens)], f"wrong tokens in choice {choice}: {call.describe()}"


def _check_complete(call: Call) -> None:
    finished = call.finished
    assert finished is not None
    assert [end.choice for end in finished.choices] == list(range(call.n)), call.describe()
    for end in finished.choices:
        tokens, reference = call.tokens_of(end.choice), call.reference(end.choice)
        text = call.reference_text(end.choice)
        if end.HasField("stop_string"):
            assert end.stop_string == call.stop
            text = text[: text.index(call.stop)]
        else:
            assert not call.stop or call.stop not in text, f"a stop string was missed: {call.describe()}"
            assert tokens == reference, f"choice {end.choice} is not whole: {call.describe()}"
            reason = (
                common_pb2.FINISH_REASON_LENGTH
                if len(reference) == call.max_tokens_in_force
                else common_pb2.FINISH_REASON_STOP
            )
            assert end.finish_reason == reason, call.describe()
        assert call.text_of(end.choice) == text, f"wrong text in choice {end.choice}: {call.describe()}"


def check_engines(cluster: Cluster) -> None:
    """No engine, dead ones included, ever broke a contract."""
    for engine in cluster.engines:
        assert engine.runner.faults == []
        assert engine.core.stats().failed_steps == 0
    books.check_fences(cluster)


def check_at_rest(cluster: Cluster) -> None:
    """All is up, nothing runs: nothing is held anywhere."""
    leaders = cluster.leaders()
    assert len(leaders) == 1, f"{len(leaders)} schedulers lead"
    num_workers, num_routers = len(cluster.names("worker")), len(cluster.names("router"))
    for process in cluster.processes.values():
        app = process.app
        assert process.main is not None
        assert not process.main.done(), f"{process.name} has failed: {process.main}"
        if isinstance(app, RouterApp):
            counters = app.debug_counters()
            assert counters.pop("channels") <= num_workers
            assert not any(counters.values()), f"{process.name}: {counters}"
        elif isinstance(app, SchedulerApp):
            led = app in leaders
            held = {"queued": 0, "granted": 0, "leases": 0}
            held |= {"routers": num_routers * led, "workers": num_workers * led}
            assert app.debug_counters() == held, f"{process.name}: {app.debug_counters()}"
            if app.term is not None:
                app.term.core.check_invariants()
                app.term.quotas.authority.check_invariants()
                assert all(w.connected and not w.used_sequences for w in app.term.core.workers)
        else:
            assert isinstance(app, WorkerApp)
            engine = _engine_of(cluster, app)
            stats = engine.core.stats()
            blocks = (NUM_BLOCKS - stats.blocks_free, stats.host_blocks_total - stats.host_blocks_free)
            in_engine = (stats.requests, stats.sequences, *blocks)
            assert in_engine == (0, 0, 0, 0), f"{process.name}: {stats}"
            assert not engine.runtime.view.running
            engine.core.check_invariants()
            _check_pins(cluster, engine)
    books.check_clock(cluster)
    _check_policies(cluster)
    assert cluster.network.open_calls == num_workers + num_routers, "one control stream a worker, one line a router"


def _check_policies(cluster: Cluster) -> None:
    """Every process goes by the policies as they were put last."""
    for tenant, policy in cluster.policies.items():
        for qos_class in QosClass:
            flow, weight = FlowKey(TenantId(tenant), qos_class), policy.weight(qos_class)
            for process in cluster.processes.values():
                app = process.app
                known: int | None = None
                if isinstance(app, RouterApp):
                    found = app.directory.policy_of(flow.tenant_id)
                    known = found.weight(qos_class) if found is not None else 0
                elif isinstance(app, WorkerApp):
                    known = app._runtime._core._shares.weight(flow)
                elif app is not None and app.term is not None and tenant in app.term._known_tenants:
                    known = app.term.core.view.weight_of(flow)
                assert known in (None, weight), f"{process.name} gives {flow} a weight of {known}, not {weight}"


def _check_pins(cluster: Cluster, engine: Engine) -> None:
    """Every pin is kept, or it is told why not."""
    for tenant, policy in cluster.policies.items():
        adapters = engine.core.tenant_adapters().get(TenantId(tenant))
        states = adapters.pins if adapters is not None else ()
        assert tuple(state.pin.name for state in states) == policy.pinned_adapters
        for state in states:
            gone = state.pin.name == LEAVING_ADAPTER and tenant in cluster.removed_adapters
            assert state.is_ready == (state.pin.name != BROKEN_ADAPTER and not gone), f"{tenant}: {state}"
            assert state.is_ready or state.problem, f"{tenant}: {state}"


def _engine_of(cluster: Cluster, app: WorkerApp) -> Engine:
    return next(e for e in cluster.engines if e.runtime is app._runtime)


def check_stopped(cluster: Cluster) -> None:
    """All was stopped: nothing is left at all."""
    assert cluster.network.open_calls == 0
    assert not cluster.store_server.leases
