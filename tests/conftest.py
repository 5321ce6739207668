"""Options of the whole test run.

A simulation test takes the argument `sim_seed`, and runs once for each seed 0, 1, ... below `--sim-seeds`; its id shows
the seed, so that `pytest "tests/sim/test_x.py::test_y[seed 17]" --sim-seeds 18` is that run again. Seeds that found a
bug are given to a test by name: `@pytest.mark.parametrize("sim_seed", [17])`. A test marked `each_nth_seed(n)` runs
with each n-th of them, one marked `all_but_each_nth_seed(n)` with the others.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
from collections.abc import Iterator

import grpc.aio
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from manylora_shared.process import compiled

DEFAULT_SIM_SEEDS = 12
DEFAULT_FAIR_SCHEDULES = 200

_FULL_COLLECTION = 64  # tests
_LONGEST_WAIT_S = 900.0  # between two tests
_num_ended = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sim-seeds",
        type=int,
        default=DEFAULT_SIM_SEEDS,
        metavar="N",
        help=f"run each simulation with the seeds 0 to N-1 (default {DEFAULT_SIM_SEEDS})",
    )
    parser.addoption(
        "--fair-schedules",
        type=int,
        default=DEFAULT_FAIR_SCHEDULES,
        metavar="N",
        help=f"hold so many random schedules to the fairness bound (default {DEFAULT_FAIR_SCHEDULES})",
    )
    parser.addoption(
        "--fairness-seconds",
        type=float,
        default=12.0,
        metavar="S",
        help="how long shares are measured through real services (default 12)",
    )
    parser.addoption(
        "--soak-seconds", type=float, default=60.0, metavar="S", help="how long the soak runs (default 60)"
    )
    parser.addoption(
        "--fuzz-examples",
        type=int,
        default=2,
        metavar="N",
        help="requests of each kind to each RPC and route (default 2)",
    )
    parser.addoption("--compiled", action="store_true", help="run the compiled modules, which deploy/compile.py made")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--compiled") and (why_not := compiled.use()):
        raise pytest.UsageError(f"--compiled: {why_not}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Takes what is imported (torch, transformers, peft) out of the garbage collector's sight.

    It stays for as long as the tests run. To walk it again in each full collection was a tenth of their time, and a
    third of the imports'. From here on nothing but `pytest_runtest_teardown` collects: by itself the collector runs in
    whichever thread allocates, and what gRPC's objects do at their end there was seen to block, once in the thread by
    which pytest-xdist tells its worker what to run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        asyncio.run(_hold_grpc())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    try:
        return (yield)
    finally:
        global _num_ended
        _num_ended += 1
        gc.collect(1 if _num_ended % _FULL_COLLECTION else 2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A worker of pytest-xdist that waits for so long is told nothing any more, and nobody would say so."""
    try:
        return (yield)
    finally:
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(_LONGEST_WAIT_S, file=stderr, exit=True)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


async def _hold_grpc() -> None:
    """Keeps gRPC's poller for as long as the tests run.

    gRPC ends it with its last channel or server, and waits for its thread, though that one goes by a garbage
    collection in the midst of another test. Such a wait was seen to have no end.
    """
    grpc.aio.init_grpc_aio()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = {
        name
        for mark in metafunc.definition.iter_markers("parametrize")
        for name in ([n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0])
    }
    if "sim_seed" in metafunc.fixturenames and "sim_seed" not in given:
        seeds = list(range(metafunc.config.getoption("--sim-seeds")))
        for mark in metafunc.definition.iter_markers("each_nth_seed"):
            seeds = [seed for seed in seeds if seed % mark.args[0] == 0]
        for mark in metafunc.definition.iter_markers("all_but_each_nth_seed"):
            seeds = [seed for seed in seeds if seed % mark.args[0] != 0]
        metafunc.parametrize("sim_seed", seeds, ids=[f"seed {seed}" for seed in seeds])


@pytest.fixture
def fair_schedules(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fair-schedules"))
