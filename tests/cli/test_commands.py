"""Commands in their own process, against a fake router: what reaches the server, stdout, stderr, exit codes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from manylora.cli.overview import _ACCOUNTS, _GIVES_UP
from manylora.client.credentials import remove_note, write_note
from manylora_shared.sampling import PARAMETERS, Sampling
from manylora_shared.tenancy.overload import Rung

from tests.cli.conftest import Manylora
from tests.cli.fake_server import VERSION, FakeRouter

TWO_TENANTS = "# who pays\ntenant_id: acme\n---\ntenant_id: birch\nclasses: {}\n---\n"


async def test_it_starts_as_a_module_too(address: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "manylora", "generate", "--json", "--server", address, "one two"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    assert (process.returncode, json.loads(stdout)["text"], stderr) == (0, "ONE TWO", b"ONE TWO\n")


async def test_generate_streams_text_and_sends_what_was_asked(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora(
        *("generate", "--tenant", "acme", "--adapter", "upper", "--class", "batch", "--max-tokens", "9"),
        *("--temperature", "0.5", "--seed", "12", "--stop", "a", "--stop", "b c"),
        *("--priority", "-7", "--timeout", "60", "one two"),
    )
    assert (out.exit_code, out.stdout, out.stderr) == (0, "ONE TWO\n", "")
    request, metadata = router.requests[0], router.metadata[0]
    assert (request.text, request.max_tokens, list(request.stop)) == ("one two", 9, ["a", "b c"])
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 12)
    assert not request.sampling.HasField("top_k")
    asked = {k: v for k, v in metadata.items() if k.startswith("x-")}
    assert asked == {"x-tenant-id": "acme", "x-adapter-id": "upper", "x-request-class": "batch", "x-priority": "-7"}
    (left_s,) = router.times_left_s
    assert left_s is not None
    assert 50 < left_s <= 60


async def test_generate_has_an_option_for_each_sampling_parameter(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora(
        *(
            "generate",
            "--tenant",
            "acme",
            "--temperature",
            "0.5",
            "--top-k",
            "3",
            "--top-p",
            "0.25",
            "--min-p",
            "0.125",
        ),
        *("--repetition-penalty", "1.5", "--presence-penalty", "-0.5", "--frequency-penalty", "0.75", "--seed", "0"),
        *("--top-logprobs", "0", "--logit-bias", "3=-1.5", "--logit-bias", "7=2", "--min-tokens", "4"),
        *("--bad-words", "no", "--bad-words", " never", "one two"),
    )
    assert out.exit_code == 0, out.stderr
    assert Sampling.of_message(router.requests[0].sampling) == Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        seed=0,
        top_logprobs=0,
        logit_bias={3: -1.5, 7: 2.0},
        min_tokens=4,
        bad_words=("no", " never"),
    )
    options = (await manylora("generate", "--help")).stdout
    assert all(f"--{row.name.replace('_', '-')}" in options for row in PARAMETERS)


async def test_generate_refuses_a_bias_that_is_none(manylora: Manylora) -> None:
    out = await manylora("generate", "--tenant", "acme", "--logit-bias", "3:4", "one two")
    assert (out.exit_code, out.stdout) == (2, "")
    assert "--logit-bias: '3:4' is not TOKEN_ID=BIAS" in out.stderr


async def test_generate_json_ends_with_one_object(manylora: Manylora) -> None:
    out = await manylora("generate", "--tenant", "acme", "--json", "one two")
    assert out.exit_code == 0
    assert out.stderr == "ONE TWO\n"
    assert out.json == {
        "request_id": "r-1",
        "text": "ONE TWO",
        "token_ids": [100, 101],
        "finish_reason": "stop",
        "outcome": "completed",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_prompt_tokens": 0},
        "adapter_version": VERSION,
        "seed": 7,
        "worker_id": "w-1",
        "timings": {
            "queue_ms": 0.5,
            "ttft_ms": 1.5,
            "total_ms": 2.5,
            "adapter_wait_ms": 0.0,
            "prefill_ms": 0.0,
            "decode_ms": 0.0,
        },
    }


async def test_generate_takes_token_ids_and_stdin(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("generate", "--tenant", "acme", "--token-ids", "3, 1,2")
    assert (out.exit_code, out.stdout) == (0, "3,1,2\n")
    assert list(router.requests[0].token_ids.ids) == [3, 1, 2]
    out = await manylora("generate", "--tenant", "acme", "-", stdin="from stdin")
    assert (out.exit_code, out.stdout) == (0, "FROM STDIN\n")


async def test_a_refused_request_is_told_on_stderr_and_in_json(manylora: Manylora) -> None:
    message = "sampling.temperature: must be at least 0; max_tokens: must be at most 5"
    out = await manylora("generate", "--tenant", "acme", "two wrongs")
    told = "INVALID_ARGUMENT: 2 errors\n  sampling.temperature: must be at least 0\n  max_tokens: must be at most 5\n"
    assert (out.exit_code, out.stdout, out.stderr) == (1, "", told)
    out = await manylora("generate", "--tenant", "acme", "--json", "two wrongs")
    assert out.exit_code == 1
    assert out.json["error"] == {
        "code": "INVALID_ARGUMENT",
        "reason": "INVALID",
        "message": message,
        "violations": [
            {"field": "sampling.temperature", "description": "must be at least 0"},
            {"field": "max_tokens", "description": "must be at most 5"},
        ],
    }


async def test_a_stream_that_breaks_shows_what_had_come(manylora: Manylora) -> None:
    out = await manylora("generate", "--tenant", "acme", "one die")
    assert (out.exit_code, out.stdout) == (1, "ONE DIE\n")
    assert out.stderr == "UNAVAILABLE: worker w-1 was lost\n"
    out = await manylora("generate", "--tenant", "acme", "one die", "--json")
    assert out.json["error"]["code"] == "UNAVAILABLE"
    assert out.json["partial"]["outcome"] == "worker_lost"
    assert out.json["partial"]["text"] == "ONE DIE"


async def test_a_name_that_cannot_be_sent_is_refused_here(manylora: Manylora) -> None:
    out = await manylora("generate", "--tenant", "a\nb", "--adapter", "ä", "--json", "x")
    assert out.exit_code == 1
    assert [v["field"] for v in out.json["error"]["violations"]] == ["x-tenant-id", "x-adapter-id"]


async def test_no_server_is_a_failed_request(manylora: Manylora, nobody: str) -> None:
    out = await manylora("status", "--json", "--server", nobody)
    assert out.exit_code == 1
    assert out.json["error"]["code"] == "UNAVAILABLE"


async def test_tenants(manylora: Manylora, router: FakeRouter, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(TWO_TENANTS)
    out = await manylora("tenant", "apply", str(file))
    assert (out.exit_code, out.stdout) == (0, "acme: applied, version 1\nbirch: applied, version 1\n")
    out = await manylora("tenant", "apply", "-", "--json", stdin=TWO_TENANTS)
    applied = [{"tenant_id": "acme", "version": 2}, {"tenant_id": "birch", "version": 2}]
    assert (out.exit_code, out.json) == (0, {"applied": applied})
    out = await manylora("tenant", "get", "birch")
    assert (out.exit_code, out.stdout) == (0, "---\ntenant_id: birch\nclasses: {}\n")
    out = await manylora("tenant", "list", "--json")
    assert [(t["tenant_id"], t["version"], t["adapters"]) for t in out.json["tenants"]] == [
        ("acme", 2, 0),
        ("birch", 2, 0),
    ]
    out = await manylora("tenant", "delete", "birch", "--json")
    assert out.json == {"tenant_id": "birch", "removed_adapters": 0}
    out = await manylora("tenant", "get", "birch")
    assert (out.exit_code, out.stdout, out.stderr) == (1, "", "NOT_FOUND: tenant 'birch' is not known\n")
    assert list(router.tenants) == ["acme"]


async def test_apply_stops_at_the_first_bad_document_and_says_which(manylora: Manylora, router: FakeRouter) -> None:
    text = "tenant_id: acme\n---\n# comment\ntenant_id: bad\n---\ntenant_id: cedar\n"
    out = await manylora("tenant", "apply", "-", "--json", stdin=text)
    assert out.exit_code == 1
    assert out.json["applied"] == [{"tenant_id": "acme", "version": 1}]
    error = out.json["error"]
    assert error["message"] == "stdin: classes.batch.weight: line 3: must be a whole number"
    assert error["violations"] == [{"field": "classes.batch.weight", "description": "line 3: must be a whole number"}]
    assert list(router.tenants) == ["acme"]


async def test_every_error_of_a_document_stands_at_its_line_of_the_file(manylora: Manylora, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenant_id: acme\n---\ntenant_id: very-bad\n")
    told = [f"INVALID_ARGUMENT: {file}: 30 errors", *(f"  field-{i}: line {i + 2}: {'x' * 80}" for i in range(30))]
    for command in ("apply", "diff"):
        out = await manylora("tenant", command, str(file))
        assert (out.exit_code, out.stderr.splitlines()) == (1, told), command


@pytest.mark.parametrize("command", ["apply", "diff"])
async def test_what_is_no_document_is_told_so(manylora: Manylora, router: FakeRouter, command: str) -> None:
    for text in ("", "# nothing yet\n", "---\n"):
        out = await manylora("tenant", command, "-", stdin=text)
        assert (out.exit_code, out.stderr) == (1, "INVALID_ARGUMENT: stdin: has no policy document\n")
    out = await manylora("tenant", command, "-", stdin=b"tenant_id: a\xff")
    assert (out.exit_code, out.stdout) == (2, "")
    assert out.stderr.startswith("Error: stdin: cannot be read: 'utf-8' codec can't decode byte 0xff")
    assert not router.tenants


async def test_a_cluster_is_not_started_for_policies_that_will_be_refused(manylora: Manylora, tmp_path: Path) -> None:
    file, data = tmp_path / "tenants.yaml", tmp_path / "data"
    file.write_text("tenant_id: acme\n---\ntenant_id: birch\nclasses: {batch: {weight: 0}}\nowner: me\n")
    out = await manylora("up", "--model", "demo", "--port", "0", "--data", str(data), "--tenants", str(file))
    assert (out.exit_code, out.stdout) == (1, "")
    told = out.stderr.splitlines()
    assert told[0] == f"INVALID_ARGUMENT: {file}: 2 errors"
    assert [line.split(":")[:2] for line in told[1:]] == [["  classes.batch.weight", " line 4"], ["  owner", " line 5"]]
    assert not data.exists()


async def test_a_quarantine_is_lifted_and_who_missed_it_is_told(manylora: Manylora) -> None:
    out = await manylora("tenant", "lift-quarantine", "acme")
    assert (out.exit_code, out.stdout, out.stderr) == (0, "acme: 2 prompts out of quarantine\n", "")
    out = await manylora("tenant", "lift-quarantine", "cedar", "--json")
    assert (out.exit_code, out.stderr) == (1, "not at r-2, which did not answer\n")
    assert out.json == {"tenant_id": "cedar", "prompts": 2, "missed_router_ids": ["r-2"]}


async def test_adapters(manylora: Manylora, router: FakeRouter, adapter_folder: Path) -> None:
    adapter_files = {f.name: f.read_bytes() for f in sorted(adapter_folder.iterdir())}  # noqa: ASYNC240
    out = await manylora("adapter", "add", "upper", str(adapter_folder), "--tenant", "acme", "--json")
    assert out.exit_code == 0
    assert (out.json["tenant_id"], out.json["name"], out.json["version"]) == ("acme", "upper", VERSION)
    files = router.adapters["acme", "upper"]
    assert files == adapter_files
    assert router.largest_chunk_bytes == 1 << 20
    out = await manylora("adapter", "add", "stored", "store:team/a", "--tenant", "acme")
    assert (out.exit_code, router.store_paths) == (0, {("acme", "stored"): "team/a"})
    out = await manylora("adapter", "add", "upper", str(adapter_folder), "--tenant", "acme")
    assert (out.exit_code, out.stderr) == (1, "ALREADY_EXISTS: adapter upper: exists\n")
    out = await manylora("adapter", "list", "--json")
    assert [a["name"] for a in out.json["adapters"]] == ["stored", "upper"]
    out = await manylora("adapter", "list", "--tenant", "other")
    assert (out.exit_code, out.stdout, out.stderr) == (0, "", "there are no adapters\n")
    out = await manylora("adapter", "remove", "upper", "--tenant", "acme")
    assert (out.exit_code, out.stdout) == (0, "acme/upper: removed\n")
    out = await manylora("adapter", "remove", "upper", "--tenant", "acme", "--json")
    assert (out.exit_code, out.json["error"]["code"]) == (1, "NOT_FOUND")


async def test_what_the_server_would_refuse_is_not_sent(
    manylora: Manylora, router: FakeRouter, adapter_folder: Path
) -> None:
    (adapter_folder / "adapter_config.json").unlink()
    (adapter_folder / "adapter_model.safetensors").rename(adapter_folder / "adapter_model.bin")
    out = await manylora("adapter", "add", "upper", str(adapter_folder), "--tenant", "acme", "--json")
    assert out.exit_code == 1
    assert out.json["error"]["code"] == "INVALID_ARGUMENT"
    fields = [v["field"] for v in out.json["error"]["violations"]]
    assert fields == ["adapter_config.json", "adapter_model.safetensors"]
    assert "pickle" in out.json["error"]["message"]
    assert router.adapters == {}


async def test_status(manylora: Manylora) -> None:
    out = await manylora("status", "--json")
    assert out.json["base_model"] == "tiny"
    assert out.json["scheduler"]["flows"][0]["qos_class"] == "batch"
    assert out.json["workers"][0]["generated_tokens"] == 2**40
    measured, idle = out.json["slos"]
    assert (measured["error_budget"], measured["ttft_p95_target_ms"], measured["ttft_met"]) == (0.75, 200, False)
    assert (measured["qos_class"], measured["tpot_p50_ms"]) == ("interactive", None)
    assert (idle["error_budget"], idle["ttft_p95_ms"], idle["ttft_met"]) == (None, None, None)
    assert out.json["circuits"][0] == {
        "tenant_id": "acme",
        "whole_tenant": False,
        "adapter_version": VERSION,
        "router_id": "r-1",
        "half_open": False,
        "retry_after_s": 1.5,
        "openings": 2,
    }
    overload = out.json["scheduler"]["overload"]
    assert (overload["level"], overload["rung"]) == (40, "batch_output")
    assert overload["classes"][0]["late_part"] == 0.125
    assert overload["classes"][1] == {
        "qos_class": "batch",
        "late_part": None,
        "target_ms": None,
        "refused_by_routers": 30,
        "refused": 1,
        "shed": 4,
        "capped": 9,
    }
    assert overload["tenants"] == [{"tenant_id": "acme", "level": 97, "rung": "interactive", "demand_shares": 3.5}]
    assert out.json["scheduler"]["neighbours"] == [
        {
            "kind": "kv_growth",
            "tenant_id": "acme",
            "worker_id": "w-1",
            "evidence": {"kv_blocks": 12345.0, "kv_part": 0.75},
        }
    ]
    acme, birch = out.json["scheduler"]["adapters"]
    assert (acme["device_bytes"], acme["evictions"], acme["displaced"], birch["pins"]) == (3 << 20, 9, 1, [])
    assert acme["pins"][1] == {
        "name": "lower",
        "adapter_version": "",
        "workers": 2,
        "on_device": 0,
        "problem": "no adapter has this name",
    }
    assert out.json["scheduler"]["setbacks"] == [
        {"tenant_id": "birch", "preemptions": 11, "swaps_out": 4, "evictions": 2, "recomputed_tokens": 512}
    ]
    out = await manylora("status")
    assert out.exit_code == 0
    assert "w-1" in out.stdout
    assert "overload   level 40 of 128: answers of batch requests are cut short" in out.stdout
    assert _GIVES_UP.keys() == {rung.value for rung in Rung}
    assert "epoch 5" in out.stdout
    assert "r-1 (127.0.0.1:1, not answering)" in out.stdout
    rows = [line.split("  ") for line in out.stdout.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert ["batch", "-", "half the deadline", "31", "4", "9"] in cells
    assert ["interactive", "12 %", "200 ms", "0", "0", "0"] in cells
    assert ["acme", "3.5", "97", "interactive requests are given up"] in cells
    assert ["acme", "3.0 MiB", "2.5 MiB", "9", "1", "1 of 3"] in cells
    assert ["birch", "0.0 MiB", "0.0 MiB", "0", "0", "-"] in cells
    assert ["acme", "lower", "0 of 2", "no adapter has this name"] in cells
    assert ["acme", "words", "1 of 2", "being loaded"] in cells
    assert ["acme", "kv_growth", "w-1", "kv_blocks 12345, kv_part 0.75"] in cells
    setbacks = cells.index(["tenant's sequences", "preemptions", "swaps out", "evictions", "recomputed tokens"])
    assert ["birch", "11", "4", "2", "512"] in cells[setbacks:]
    level = ["acme", "interactive", "12.3 ms", "240 ms", "200 ms, missed", "-", "-"]
    assert [*level, "400, 1 failed", "99.750 %", "99 %", "75 %"] in cells
    assert ["birch", "batch", "-", "-", "-", "-", "-", "0, 0 failed", "100.000 %", "-", "-"] in cells
    assert ["acme", f"adapter {VERSION[:12]}", "r-1", "open", "1.5 s"] in cells
    assert ["birch", "3", "r-1", "300 s"] in cells[
        cells.index(["tenant", "quarantined prompts", "router", "for another"]) :
    ]
    assert ["acme", "1.5 MiB", "1.0 MiB"] in cells[cells.index(["tenant's KV", "on devices", "most on one"]) :]
    accounts = cells.index([name for name, _ in _ACCOUNTS])
    assert ["acme", "batch", "2", "64", "900", "-7"] in cells[accounts:]
    assert ["birch", "standard", "1", "0", "50", "no bucket"] in cells[accounts:]


async def test_a_tenants_status_says_nothing_of_machines(manylora: Manylora, router: FakeRouter) -> None:
    router.tells_tenant_alone = True
    out = await manylora("status")
    gives_up = "answers of batch requests are cut short"
    shown = f"model      tiny\nscheduler  reachable\nadapters   2\n\noverload   level 40 of 128: {gives_up}\n"
    assert (out.exit_code, out.stdout, out.stderr) == (0, shown, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate",),
        ("generate", "--tenant", "a"),
        ("generate", "--tenant", "a", "hello", "--token-ids", "1"),
        ("generate", "--tenant", "a", "--token-ids", "1,x"),
        ("generate", "--tenant", "a", "--token-ids", "1,,2"),
        ("generate", "--tenant", "a", "--token-ids", "4294967296"),
        ("generate", "--tenant", "a", "hello", "--max-tokens", "-1"),
        ("generate", "--tenant", "a", "hello", "--class", "gold"),
        ("generate", "--tenant", "a", "hello", "--seed", "-3"),
        ("adapter", "add", "x", "folder"),
        ("tenant", "apply", "no-such-file.yaml"),
        ("up",),
        ("up", "--model", "no-such-folder"),
        ("up", "--model", "demo", "--workers", "0"),
        ("up", "--model", "demo", "--tenants", "no-such-file.yaml"),
        ("no-such-command",),
    ],
)
async def test_wrong_usage_is_exit_code_2(manylora: Manylora, router: FakeRouter, arguments: tuple[str, ...]) -> None:
    out = await manylora(*arguments)
    assert (out.exit_code, out.stdout) == (2, "")
    assert "Error" in out.stderr
    assert router.requests == []


async def test_keys(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("key", "create", "--tenant", "acme", "--name", "ci")
    key = "mlk-0000000000000000-" + "5" * 64
    assert (out.exit_code, out.stdout) == (0, key + "\n")
    assert key not in out.stderr
    assert list(router.keys["0" * 16].scopes) == ["generate"]
    out = await manylora("key", "create", "--scope", "gateway", "--scope", "operator", "--json")
    assert (out.json["key"][:20], out.json["scopes"]) == ("mlk-0000000000000001", ["gateway", "operator"])
    out = await manylora("key", "list")
    assert "acme" in out.stdout
    assert "5" * 64 not in out.stdout
    out = await manylora("key", "revoke", "0" * 16)
    assert (out.exit_code, out.stdout) == (0, f"{'0' * 16}: revoked\n")
    out = await manylora("key", "list", "--tenant", "acme", "--json")
    assert [(k["key_id"], k["revoked_unix_s"]) for k in out.json["keys"]] == [("0" * 16, 2.0)]
    out = await manylora("key", "revoke", "nosuch", "--json")
    assert (out.exit_code, out.json["error"]["code"]) == (1, "NOT_FOUND")
    assert (await manylora("key", "create")).exit_code == 2
    assert (await manylora("key", "create", "--scope", "root")).exit_code == 2


async def test_the_key_that_is_presented(
    manylora: Manylora, router: FakeRouter, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MANYLORA_KEY", raising=False)

    async def presented(*more: str) -> str | None:
        out = await manylora("generate", "one", *more)
        assert out.exit_code == 0, out.stderr
        return router.metadata[-1].get("authorization")

    assert await presented() is None
    key_file = tmp_path / "operator.key"
    key_file.write_text("mlk-of-the-cluster\n")
    write_note(address, key_file)
    assert await presented() == "Bearer mlk-of-the-cluster"
    monkeypatch.setenv("MANYLORA_KEY", "mlk-of-the-environment")
    assert await presented() == "Bearer mlk-of-the-environment"
    assert await presented("--key", "mlk-of-the-flag") == "Bearer mlk-of-the-flag"
    monkeypatch.delenv("MANYLORA_KEY")
    remove_note(address, tmp_path / "another.key")
    assert await presented() == "Bearer mlk-of-the-cluster"
    remove_note(address, key_file)
    assert await presented() is None
    out = await manylora("generate", "one", "--key", "ä")
    assert out.exit_code == 1
    assert "authorization" in out.stderr
    assert "ä" not in out.stderr


async def test_a_diff_changes_nothing(manylora: Manylora, router: FakeRouter, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenant_id: acme\nlevel: 1\n---\ntenant_id: birch\n")
    assert (await manylora("tenant", "apply", str(file))).exit_code == 0
    file.write_text("tenant_id: acme\nlevel: 2\n---\ntenant_id: birch\n---\ntenant_id: cedar\n")
    before = dict(router.tenants)
    out = await manylora("tenant", "diff", str(file), "--json")
    assert [(c["tenant_id"], c["version"], c["changed"]) for c in out.json["changes"]] == [
        ("acme", 1, True),
        ("birch", 1, False),
        ("cedar", 0, True),
    ]
    assert "-level: 1\n+level: 2\n" in out.json["changes"][0]["diff"]
    out = await manylora("tenant", "diff", str(file))
    assert out.exit_code == 0
    assert "--- acme (version 1)\n+++ acme (as it would be)\n" in out.stdout
    assert "--- /dev/null\n+++ cedar" in out.stdout
    assert router.tenants == before
    file.write_text("tenant_id: bad\n")
    out = await manylora("tenant", "diff", str(file), "--json")
    assert (out.exit_code, out.json["error"]["code"]) == (1, "INVALID_ARGUMENT")


async def test_an_apply_that_expects_a_version(manylora: Manylora, router: FakeRouter, tmp_path: Path) -> None:
    file = tmp_path / "tenant.yaml"
    file.write_text("tenant_id: acme\n")
    assert (await manylora("tenant", "apply", str(file), "--expect-version", "0")).exit_code == 0
    out = await manylora("tenant", "apply", str(file), "--expect-version", "0", "--json")
    assert (out.exit_code, out.json["error"]["code"]) == (1, "ABORTED")
    assert (await manylora("tenant", "apply", str(file), "--expect-version", "1")).exit_code == 0
    assert router.tenants["acme"][1] == 2
    file.write_text(TWO_TENANTS)
    assert (await manylora("tenant", "apply", str(file), "--expect-version", "2")).exit_code == 2
