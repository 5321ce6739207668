"""`tenant`: documents applied, compared, shown and removed, and errors at their lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from manylora.cli.tenants import split_documents

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter

TWO_TENANTS = "# who pays\ntenant_id: acme\n---\ntenant_id: birch\nclasses: {}\n---\n"


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
    out = await manylora("tenant", "delete", "birch", "--yes", "--json")
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


@pytest.mark.parametrize(
    "text", ["\n\ufeff...\n", '\n\ufeff"\n', "# c\n\ufeff|\n- ", "\ufeff\ufeff- ---\n\ufeff\x85", 'a: "\\UFFFFFFFF"\n']
)
@pytest.mark.parametrize("command", ["apply", "diff"])
async def test_what_cannot_be_cut_is_the_servers_to_refuse(
    manylora: Manylora, router: FakeRouter, command: str, text: str
) -> None:
    out = await manylora("tenant", command, "-", stdin=text)
    assert "Traceback" not in out.stderr
    documents = split_documents(text)
    assert "".join(document.text for document in documents) in text


async def test_a_quarantine_is_lifted_and_who_missed_it_is_told(manylora: Manylora) -> None:
    out = await manylora("tenant", "lift-quarantine", "acme")
    assert (out.exit_code, out.stdout, out.stderr) == (0, "acme: 2 prompts out of quarantine\n", "")
    out = await manylora("tenant", "lift-quarantine", "cedar", "--json")
    assert (out.exit_code, out.stderr) == (1, "not at r-2, which did not answer\n")
    assert out.json == {"tenant_id": "cedar", "prompts": 2, "missed_router_ids": ["r-2"]}


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


async def test_a_tenant_is_not_deleted_before_somebody_agrees(manylora: Manylora, router: FakeRouter) -> None:
    await manylora("tenant", "apply", "-", stdin="tenant_id: acme\n")
    for answer in ("", "n\n"):
        out = await manylora("tenant", "delete", "acme", stdin=answer)
        assert (out.exit_code, out.stdout) == (2, "")
        assert "Error: acme is not removed; --yes does it without asking" in out.stderr
    assert list(router.tenants) == ["acme"]
    out = await manylora("tenant", "delete", "acme", stdin="y\n")
    assert (out.exit_code, list(router.tenants)) == (0, [])
