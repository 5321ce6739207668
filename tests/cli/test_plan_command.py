"""`manylora plan`: files in, a plan out, and what is said of bad ones."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from manylora.capacity.planning.shapes import CONFIGS
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
        (
            MIX.replace("rate: 5", "rate: 5, kind: gamma, cv: 1.0e-200"),
            "arrivals.cv: must be at least 0.01, not 1e-200",
        ),
        (MIX.replace("rate: 5", "rate: 5, kind: gamma, cv: 1.0e+200"), "arrivals.cv: must be at most 100, not 1e+200"),
        (MIX.replace("rate: 5", f"rate: {'9' * 400}"), "arrivals.rate: must be a number, not 9999"),
        (MIX.replace("rate: 5", f"rate: {'9' * 5000}"), "is no YAML"),
        (MIX.replace("rate: 5", "rate: 1.0e+300"), "arrivals.rate: must be at most 1e+06"),
        (MIX.replace("rate: 5", "rate: 1.0e-300"), "arrivals.rate: must be at least 1e-09"),
        (
            MIX.replace("rate: 5", "rate: 5, kind: diurnal, period_s: 1.0e-320"),
            "arrivals.period_s: must be at least 0.001",
        ),
        (MIX.replace("rate: 5", "rate: 5, kind: on-off, on_s: 1.0e-320, off_s: 0"), "arrivals.on_s: must be at least"),
        (MIX.replace("duration_s: 10", "duration_s: 1.0e-320"), "duration_s: must be at least 0.001"),
        (MIX.replace("duration_s: 10", "duration_s: 2026-13-45"), "is no YAML"),
        (MIX.replace("rank: 16", "rank: 1000000"), "tenants.acme.rank: must be at most 512"),
        (MIX.replace("rank: 16", "share: 1.0e+308"), "tenants.acme.share: must be at most 1e+09"),
        (
            MIX.replace("output_tokens: 64", "output_tokens: {mean: 64, cv: 1.0e+200}"),
            "tenants.acme.output_tokens.cv: must be at most 100, not 1e+200",
        ),
        (
            MIX.replace("output_tokens: 64", "output_tokens: {mean: 1.0e+308}"),
            "tenants.acme.output_tokens.mean: must be at most 1.67772e+07",
        ),
        (
            MIX.replace("output_tokens: 64", f"output_tokens: '{'9' * 5000}'"),
            "tenants.acme.output_tokens: must be a number, LEAST-MOST or a mapping",
        ),
        ("[" * 3000 + "]" * 3000, "is no YAML"),
        ('a: "\\UFFFFFFFF"', "is no YAML"),
    ],
)
def test_a_bad_mix_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mix.yaml").write_text(text)
    code, _, error = run("--tenants", str(tmp_path / "mix.yaml"), *GPU)
    assert code == 2
    assert says in " ".join(error.split())


def test_bad_options_and_files_are_refused(tmp_path: Path, mix: str) -> None:
    (tmp_path / "rows.json").write_text('{"rows": []}')
    (tmp_path / "endless.json").write_text('[{"completion_tokens": 5, "began_unix_s": Infinity}]')
    (tmp_path / "deep.json").write_text("[" * 100_000)
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
        (
            ("--from-ledger", str(tmp_path / "endless.json")),
            "row 1: began_unix_s: must be a number of seconds, not inf",
        ),
        (("--from-ledger", str(tmp_path / "deep.json")), "is neither SQLite nor JSON"),
    ]:
        rest = () if "--model" in arguments else GPU
        code, _, error = run(*arguments, *rest)
        assert (code, says in " ".join(error.split())) == (2, True), error


@pytest.mark.parametrize("option", ["host-gib", "gpu-hour", "ttft-ms", "tpot-ms", "spare", "seconds", "window"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_that_nothing_can_be_computed_with_is_refused_by_its_option(mix: str, option: str, value: str) -> None:
    code, _, error = run("--tenants", mix, *GPU, f"--{option}", value)
    assert (code, f"Invalid value for '--{option}'" in error) == (2, True), error


@pytest.mark.parametrize(
    ("model", "fields", "says"),
    [
        ({"model_type": []}, {}, "model_type: must be text, not []"),
        ({"model_type": "qwen3_5_text"}, {"num_hidden_layers": 1}, "num_hidden_layers: none of 1 layers has keys and"),
        ({"model_type": "qwen2_moe"}, {"mlp_only_layers": 5}, "mlp_only_layers: must be a list, not 5"),
        ({}, {"quantization_config": 5}, "quantization_config: must be an object, not 5"),
    ],
)
def test_an_odd_config_is_refused_by_its_field(
    tmp_path: Path, mix: str, model: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    config = {**CONFIGS["qwen3.5-9b"], **model, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, error = run("--tenants", mix, "--model", str(tmp_path), "--gpu", "H100")
    assert (code, says in " ".join(error.split())) == (2, True), error
