"""`adapter check`, `report`, `samples` and `export`: what is sent, what is shown, and with which exit code."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter
from tests.cli.test_adapter_page import REPORT


async def test_check_sends_folder_and_samples_and_fails_where_the_adapter_does(
    manylora: Manylora, router: FakeRouter, adapter_folder: Path, tmp_path: Path
) -> None:
    samples, page = tmp_path / "samples.jsonl", tmp_path / "page.html"
    samples.write_text('{"prompt": "a", "expected": "b"}')
    words = ["adapter", "check", str(adapter_folder), "--tenant", "acme", "--name", "up", "--samples", str(samples)]
    out = await manylora(*words, "--html", str(page), "--json")
    assert (out.exit_code, out.json["modules"], out.json["name"]) == (0, REPORT["modules"], "up")
    assert "<h2>Stages</h2>" in page.read_text()
    header, files = router.checks[-1]
    assert (header.tenant_id, header.judge) == ("acme", "")
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors", "samples.jsonl"}
    out = await manylora(*words, "--judge", "contains")
    assert out.exit_code == 1
    assert "acme/up (abababababab): rejected\n" in out.stdout
    assert "scores: candidate 0.5, before 1, base 0\n" in out.stdout
    await manylora("adapter", "check", "hf://org/name", "--tenant", "acme")
    await manylora("adapter", "check", "store:team/a", "--tenant", "acme")
    assert [each.source or each.store_path for each, _ in router.checks[-2:]] == ["hf://org/name", "team/a"]
    out = await manylora("adapter", "check", str(adapter_folder), "--tenant", "acme", "--samples", "/nowhere")
    assert (out.exit_code, out.stderr) == (2, "Error: /nowhere: No such file or directory\n")


async def test_report_is_of_the_version_that_is_named(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("adapter", "report", "up@2", "--tenant", "acme")
    assert out.stdout.startswith("acme/upper@2 (")
    out = await manylora("adapter", "report", "up", "--tenant", "acme")
    assert out.stdout.startswith("acme/upper@7 (")
    out = await manylora("adapter", "report", "up@x", "--tenant", "acme")
    assert out.exit_code == 2
    assert "a version is a whole number" in out.stderr


async def test_samples_are_put_listed_and_removed(manylora: Manylora, router: FakeRouter, tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"lines")
    out = await manylora("adapter", "samples", "put", "golden", str(tmp_path / "s"), "--tenant", "acme")
    assert (out.stdout, router.samples) == ("acme/golden: 2 samples\n", {("acme", "golden"): b"lines"})
    out = await manylora("adapter", "samples", "list", "--tenant", "acme", "--json")
    assert out.json["samples"][0]["name"] == "golden"
    out = await manylora("adapter", "samples", "remove", "golden", "--tenant", "acme")
    assert (out.stdout, router.samples) == ("acme/golden: removed\n", {})


async def test_export_refuses_bytes_that_are_not_what_was_registered_and_a_folder_that_is_taken(
    manylora: Manylora, router: FakeRouter, adapter_folder: Path, tmp_path: Path
) -> None:
    await manylora("adapter", "add", "upper", str(adapter_folder), "--tenant", "acme")
    words = ["adapter", "export", "upper", "--tenant", "acme", "--model", "demo", "--merged"]
    out = await manylora(*words, str(adapter_folder))
    assert out.exit_code == 2
    assert "is there already, and not an empty folder" in out.stderr
    router.damaged.add("upper")
    out = await manylora(*words, str(tmp_path / "merged"))
    assert out.exit_code == 1
    assert out.stderr.startswith("DATA_LOSS: the files are not what was registered")
    assert not (tmp_path / "merged").exists()
