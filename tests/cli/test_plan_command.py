"""`manylora plan`: files in, a plan out, and what is said of bad ones."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from manylora.cli.app import app
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger_sinks.sqlite import SqliteSink
from typer.testing import CliRunner

MIX = """
duration_s: 10
arrivals: {rate: 5}
tenants:
  acme: {prompt_tokens: 128, output_tokens: 64, adapters: [support, sales], rank: 16}
  bolt: {prompt_tokens: 64, output_tokens: 32, class: batch}
"""
GPU = ("--model", "llama-3.1-8b", "--gpu", "H100")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def mix(tmp_path: Path) -> str:
    (tmp_path / "mix.yaml").write_text(MIX)
    return str(tmp_path / "mix.yaml")


def test_a_mix_is_planned_as_text_and_as_a_document(mix: str) -> None:
    code, text, _ = run("--tenants", mix, *GPU, "--gpu-hour", "2.5")
    assert code == 0
    assert text.startswith("1 worker, each a H100 with llama-3.1-8b\n")
    assert "cost      2.50 an hour" in text
    code, text, _ = run("--tenants", mix, *GPU, "--json")
    document = json.loads(text)
    assert (document["workers"], document["traffic"]["adapters"]) == (1, 2)
    assert set(document["tenants"]) == {"acme", "bolt"}
    assert document["cost"]["million_output_tokens"] is None
    code, text, _ = run("--tenants", mix, *GPU, "--json", "--kv-cache-dtype", "fp8")
    assert (code, json.loads(text)["curve"]["measured"]) == (0, False)
    assert "--kv-cache-dtype fp8" in json.loads(text)["worker_flags"]


def test_a_model_is_planned_over_several_gpus(mix: str) -> None:
    more = ("--tensor-parallel", "2", "--quantization", "fp8", "--kv-cache-dtype", "fp8", "--gpu-hour", "2")
    code, text, _ = run("--tenants", mix, "--model", "30b-a3b", "--gpu", "H100", "--json", *more)
    document = json.loads(text)
    assert (code, document["gpus_a_worker"], document["cost"]["hour"]) == (0, 2, 4 * document["workers"])
    for flag in ("--tensor-parallel 2", "--quantization fp8", "--kv-cache-dtype fp8"):
        assert flag in document["worker_flags"]
    code, _, error = run("--tenants", mix, *GPU, "--tensor-parallel", "3")
    assert (code, "does not divide num_attention_heads 32" in " ".join(error.split())) == (2, True)


def test_a_ledger_is_planned_from_sqlite_and_from_json(tmp_path: Path) -> None:
    rows = [
        UsageRow(
            request_id=f"r{n}", tenant="acme", qos_class="standard", adapter="support", prompt_tokens=50,
            completion_tokens=20, began_unix_s=1000 + n / 4, ended_unix_s=1001 + n / 4,
        )
        for n in range(100)
    ]  # fmt: skip
    (tmp_path / "usage.json").write_text(json.dumps([row.shown() for row in rows]))
    sink = SqliteSink(tmp_path / "usage.sqlite")
    sink.put(rows)
    sink.close()
    plans = [run("--from-ledger", str(tmp_path / name), *GPU, "--json") for name in ("usage.json", "usage.sqlite")]
    assert plans[0] == plans[1]
    document = json.loads(plans[0][1])
    assert document["traffic"]["output_tokens_per_s"] == pytest.approx(20 * 4, rel=0.05)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tenants: [", "is no YAML"),
        ("tenant_id: acme\nweight: 2\n---\ntenant_id: birch\n", "is tenants' policies; --tenants takes a mix"),
        (f"{MIX}\n---\n{MIX}", "has 2 documents"),
        (MIX.replace("rank: 16", "rank: -1"), "tenants.acme.rank: must be at least 0, not -1"),
        (MIX.replace("rank: 16", "ranks: 16"), "tenants.acme.ranks: there is no such field"),
        (MIX.replace("rate: 5", "kind: closed, streams: 5"), "a closed loop has no rate"),
    ],
)
def test_a_bad_mix_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mix.yaml").write_text(text)
    code, _, error = run("--tenants", str(tmp_path / "mix.yaml"), *GPU)
    assert code == 2
    assert says in error


def test_bad_options_and_files_are_refused(tmp_path: Path, mix: str) -> None:
    (tmp_path / "rows.json").write_text('{"rows": []}')
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as connection:
        connection.execute("CREATE TABLE other (a)")
    for arguments, says in [
        ((), "give either --tenants FILE or --from-ledger FILE"),
        (("--tenants", mix, "--model", "llama-3.1-8b"), "give either --gpu NAME or --curve FILE"),
        (("--tenants", mix, "--model", "llama-3.1-8b", "--gpu", "H900"), "--gpu: 'H900' is none of"),
        (("--tenants", mix, "--model", "nothing", "--gpu", "H100"), "'nothing' is none of llama-3.1-8b"),
        (("--from-ledger", str(tmp_path / "rows.json")), "must be a list of rows"),
        (("--from-ledger", str(tmp_path / "other.sqlite")), "other.sqlite: cannot be read: no such table: usage"),
        (("--from-ledger", mix), "is neither SQLite nor JSON"),
    ]:
        rest = () if "--model" in arguments else GPU
        code, _, error = run(*arguments, *rest)
        assert (code, says in " ".join(error.split())) == (2, True), error
