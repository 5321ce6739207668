"""Options of `manylora load`."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Manylora


async def told(manylora: Manylora, *arguments: str) -> tuple[int, str]:
    out = await manylora("load", *arguments)
    return out.exit_code, out.stderr


async def test_wrong_use_is_said_by_its_flag(manylora: Manylora, tmp_path: Path, nobody: str) -> None:
    (tmp_path / "mix.yaml").write_text("tenants: {a: {rate: 3}}")
    (tmp_path / "no.yaml").write_text("a: [")
    rate = ("--rate", "5", "--duration", "1")
    for arguments, exit_code, words in (
        ((), 2, "give a mix file, or one of --rate, --streams and --trace"),
        (("--rate", "5", "--streams", "2"), 2, "give a mix file"),
        (("--rate", "5"), 2, "--duration: is missing"),
        ((*rate, "--prompt-tokens", "x"), 2, "--prompt-tokens: must be a number, LEAST-MOST"),
        ((*rate, "--chat", "--prompt-ids"), 2, "--prompt-ids: a chat has no token ids"),
        (("--trace", str(tmp_path / "none.csv")), 2, "--trace: none.csv: cannot be read"),
        ((*rate, "--url", "127.0.0.1:7080"), 2, "must begin with http://"),
        ((str(tmp_path / "mix.yaml"), "--duration", "1"), 2, "tenants.a.rate: there is no such field"),
        ((str(tmp_path / "mix.yaml"), "--rate", "1"), 2, "--rate: is the mix file's to say"),
        ((str(tmp_path / "mix.yaml"), "--class", "batch"), 2, "--class: is the mix file's to say"),
        (("--streams", "1", "--requests", "1", "--arrivals", "gamma"), 2, "--arrivals: goes with --rate"),
        ((*rate, "--length-scale", "2"), 2, "--length-scale: goes with --trace"),
        ((str(tmp_path / "no.yaml"),), 2, "no.yaml: while parsing"),
        ((*rate, "--url", f"http://{nobody}"), 1, "nobody answers there"),
    ):
        code, stderr = await told(manylora, *arguments)
        assert (code, words in stderr) == (exit_code, True), (arguments, stderr)
