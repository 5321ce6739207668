"""`adapter`: files uploaded, listed and removed; what the server would refuse is not sent."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Manylora
from tests.cli.fake_server import VERSION, FakeRouter


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
    out = await manylora("adapter", "add", "retrained", "store:team/b", "--tenant", "acme")
    assert out.stdout.startswith("acme/retrained@2: added, ")
    assert out.stdout.endswith("; version 1 stays in force\n")
    router.store_paths.pop(("acme", "retrained"))
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


async def test_damaged_adapters_are_named_and_the_exit_code_says_so(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("adapter", "verify")
    assert (out.exit_code, out.stdout, out.stderr) == (0, "", "there are no adapters\n")
    router.adapters = {("acme", "lower"): {}, ("acme", "upper"): {}, ("other", "lower"): {}}
    out = await manylora("adapter", "verify", "--tenant", "acme")
    assert (out.exit_code, out.stderr) == (0, "")
    assert out.stdout == f"acme/lower@1 ({VERSION[:12]}): ok\nacme/upper@1 ({VERSION[:12]}): ok\n"
    router.damaged = {"upper"}
    out = await manylora("adapter", "verify")
    assert out.exit_code == 1
    assert out.stdout.splitlines()[1] == f"acme/upper@1 ({VERSION[:12]}): damaged: adapter_config.json: is missing"
    assert "1 of 3 adapters are damaged" in out.stderr
    out = await manylora("adapter", "verify", "upper", "--tenant", "acme", "--json")
    assert (out.exit_code, [each["problem"] for each in out.json["adapters"]]) == (
        1,
        ["adapter_config.json: is missing"],
    )
