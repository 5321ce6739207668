"""Compiled constraints: kept by tenant, under a cap; what cannot be compiled is named."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.errors import InvalidRequest, Unready
from manylora_shared.ids import TenantId
from manylora_worker.constraints import compiler
from manylora_worker.constraints.compiler import ConstraintCompiler, Vocabulary

DEMO = Path(__file__).resolve().parents[2] / "shared/manylora/demo/assets/base/tokenizer.json"
ACME, ZOO = TenantId("acme"), TenantId("zoo")


def words() -> Vocabulary:
    return Vocabulary(DEMO.read_text(), 512, (2,))


def regex(source: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, source)


def test_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "TENANT_BYTES", 300_000)  # two
    compiling = ConstraintCompiler(words, lambda: None)
    first = compiling.compile(ACME, regex("a")).result()
    assert first.end_token_ids == [2]
    assert compiling.compile(ACME, regex("a")).result() is first
    assert compiling.compile(ZOO, regex("a")).result() is not first
    second = compiling.compile(ACME, regex("b")).result()
    third = compiling.compile(ACME, regex("c")).result()
    assert compiling.compile(ACME, regex("c")).result() is third
    assert compiling.compile(ACME, regex("b")).result() is second
    assert compiling.compile(ACME, regex("a")).result() is not first
    compiling.close()


def test_what_cannot_be_compiled_is_named() -> None:
    compiling = ConstraintCompiler(words, lambda: None)
    with pytest.raises(InvalidRequest, match=r"constraint\.regex: .*unclosed"):
        compiling.compile(ACME, regex("(a")).result()
    with pytest.raises(InvalidRequest, match=r"constraint\.json_schema: is no JSON"):
        compiling.compile(ACME, Constraint(ConstraintKind.JSON_SCHEMA, "{")).result()
    compiling.close()


def test_a_long_chain_of_rules_ends_no_process() -> None:
    nested = "\n".join(f"r{i}: {'(' * 25}r{i + 1}{')' * 25}" for i in range(1990))
    chain = Constraint(ConstraintKind.GRAMMAR, f'start: r0\n{nested}\nr1990: "x"')
    compiling = ConstraintCompiler(words, lambda: None)
    assert compiling.compile(ACME, chain).result(60).end_token_ids == [2]
    compiling.close()


def test_a_model_without_words_is_told() -> None:
    def none() -> Vocabulary:
        raise OSError("no such file")

    for load in (none, lambda: Vocabulary(DEMO.read_text(), 512, ())):
        compiling = ConstraintCompiler(load, lambda: None)
        with pytest.raises(Unready, match="tokenizer"):
            compiling.compile(ACME, regex("a")).result()
        compiling.close()


def test_a_failure_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a large tokenizer takes a second: no tenant can ask for it with each request."""
    reads: list[None] = []

    def failing() -> Vocabulary:
        reads.append(None)
        if len(reads) > 2:
            return words()
        raise KeyError("model")  # of no kind that is foreseen

    compiling = ConstraintCompiler(failing, lambda: None)
    for _ in range(3):
        with pytest.raises(Unready, match="tokenizer cannot be used for it: 'model'"):
            compiling.compile(ACME, regex("a")).result()
    assert len(reads) == 1
    monkeypatch.setattr(compiler, "_RETRY_S", 0.0)
    monkeypatch.setattr(compiling, "_failed", None)
    with pytest.raises(Unready):
        compiling.compile(ACME, regex("a")).result()
    assert compiling.compile(ACME, regex("a")).result().end_token_ids == [2]
    compiling.close()


def test_a_mask_is_as_wide_as_the_vocabulary_also_where_32_divides_it() -> None:
    for size in (512, 513, 543, 544):
        compiling = ConstraintCompiler(lambda size=size: Vocabulary(DEMO.read_text(), size, (2,)), lambda: None)
        matcher = compiling.compile(ACME, regex("a")).result().matcher()
        matcher.take(())
        while not matcher.is_done(waits=True):
            pass
        assert not matcher.error
        assert len(matcher.mask) == 4 * -(-size // 32)
        compiling.close()


def test_tenants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks for many waits for itself."""
    monkeypatch.setattr(compiler, "_COMPILE_THREADS", 1)  # of two, who took its turn first may end last
    begun, go_on = threading.Event(), threading.Event()

    def slow_words() -> Vocabulary:
        begun.set()
        assert go_on.wait(60)
        return words()

    order: list[str] = []
    compiling = ConstraintCompiler(slow_words, lambda: None)
    with_order = {
        f"{tenant}{i}": compiling.compile(tenant, regex(f"{tenant}{i}"))
        for tenant, count in ((ACME, 20), (ZOO, 2))
        for i in range(count)
    }
    for name, future in with_order.items():
        future.add_done_callback(lambda _, name=name: order.append(name))
    assert with_order["acme19"].cancel()
    assert begun.wait(60)
    go_on.set()
    for name, future in with_order.items():
        if name != "acme19":
            future.result(60)
    assert {"zoo0", "zoo1"} <= set(order[:6]), order  # behind the one that was cancelled and acme's first: turns
    assert order[0] == "acme19"
    compiling.close()


def test_who_waits_when_it_is_closed_is_told() -> None:
    go_on = threading.Event()

    def slow_words() -> Vocabulary:
        assert go_on.wait(60)
        return words()

    compiling = ConstraintCompiler(slow_words, lambda: None)
    asked = [compiling.compile(ACME, regex(str(i))) for i in range(9)]
    compiling.close()
    go_on.set()
    assert all(future.cancelled() or future.result(60) for future in asked)
    assert asked[-1].cancelled()
