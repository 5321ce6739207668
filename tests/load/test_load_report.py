from __future__ import annotations

import json
from typing import Any

import pytest
from manylora.load.planning.mix import Tenant, mix_of
from manylora.load.planning.schedule import Planned
from manylora.load.report import COUNTS, MAX_ROWS, TIMES, document, remarks, shown_ms, tables
from manylora.load.run import Run
from manylora.load.tally import Sample


def ended(tenant: Tenant, tokens: int, error: str = "") -> Sample:
    sample = Sample(Planned(0.0, tenant, "", (), tokens, 1), 0.0, 0.0)
    for number in range(tokens):
        sample.token(0.1 + 0.02 * number)
    sample.output_tokens, sample.ended_s, sample.error = tokens, 0.2 + 0.02 * tokens, error
    return sample


def a_run(tenants: dict[str, dict[str, Any]]) -> Run:
    mix = mix_of({"duration_s": 9, "arrivals": {"rate": 1}, "tenants": tenants}, lambda name: ())
    run = Run(mix, None, max_running=9, drain_s=1)  # type: ignore[arg-type]
    run.counted_s = 2.0
    return run


def count(run: Run, sample: Sample) -> None:
    run.tallies[sample.planned.tenant.name].add(sample)
    run.total.add(sample)


def test_a_document_has_every_number_and_is_json() -> None:
    run = a_run({"a": {"weight": 3}, "b": {}, "idle": {"weight": 4}})
    a, b, _ = run.mix.tenants
    for tenant, tokens in ((a, 30), (a, 30), (b, 20)):
        count(run, ended(tenant, tokens))
    count(run, ended(b, 0, "429 overloaded"))
    found = json.loads(json.dumps(document(run, "http://x")))
    assert found["tenants"]["a"]["ttft_ms"]["p50"] == pytest.approx(100, rel=0.01)
    assert found["tenants"]["a"]["output_tokens_per_s"] == 30
    assert found["tenants"]["a"]["tokens_part"] == 0.75
    assert found["tenants"]["a"]["weight_part"] == 0.375
    assert found["tenants"]["b"]["errors"] == {"429 overloaded": 1}
    assert found["tenants"]["b"]["good_part"] == 0.5
    assert found["tenants"]["idle"]["ttft_ms"] is None
    assert found["total"]["requests"] == 4
    assert 0 < found["fairness"] < 1
    for (columns, rows), expected in zip(tables(found), (COUNTS, TIMES), strict=True):
        assert columns == expected
        assert [row[0] for row in rows] == ["a", "b", "idle", "all 3"]
        assert {len(row) for row in rows} == {len(columns)}
    assert "1 x 429 overloaded" in remarks(found)


def test_many_tenants_are_those_with_the_most_tokens() -> None:
    (_, rows), _ = tables(document(a_run({"t{n}": {"count": MAX_ROWS + 5}}), "http://x"))
    assert len(rows) == MAX_ROWS + 1
    assert rows[-1][0] == f"all {MAX_ROWS + 5}"


def test_what_makes_numbers_doubtful_is_said() -> None:
    run = a_run({"a": {}})
    run.cpu_part = 0.97
    run.late.add(0.5)
    untold = ended(run.mix.tenants[0], 3)
    untold.output_tokens = None
    count(run, untold)
    busy, late, events = remarks(document(run, "http://x"))
    assert "97 % of a core" in busy
    assert "late" in late
    assert "tells no usage" in events
    assert remarks(document(a_run({"a": {}}), "http://x")) == []


def test_milliseconds_as_people_read_them() -> None:
    assert [shown_ms(value) for value in (1.234, 123.4, 12345.0)] == ["1.2 ms", "123 ms", "12.3 s"]
