"""A plan as text."""

from __future__ import annotations

from manylora.capacity.planning.plan import document_of
from manylora.capacity.view import shown

from tests.capacity.test_plan import made


def test_a_plan_is_told_with_its_figures() -> None:
    document = document_of(made(20))
    text = shown(document)
    lines = text.splitlines()
    assert lines[0] == f"{document['workers']} worker, each a H100 with llama-3.1-8b"
    assert f"p95 {document['expected']['ttft_p95_ms']:.0f} ms" in text
    assert document["worker_flags"] in text
    assert f"{document['cost']['million_output_tokens']:.3f} a million tokens out" in text
    assert max(map(len, lines)) <= 160
    for rule in document["rules"]:
        assert any(line.startswith(f"  {rule['rule']}") for line in lines)
    assert "ACT" not in text
    document["rules"][0]["act"] = True
    assert "ACT" in shown(document)
