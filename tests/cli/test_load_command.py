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
    (tmp_path / "day.yaml").write_text("duration_s: 2026-13-45")
    (tmp_path / "huge.yaml").write_text(f"arrivals: {{rate: {'9' * 400}}}\ntenants: {{a: {{}}}}")
    (tmp_path / "vanishing.yaml").write_text("arrivals: {kind: gamma, rate: 1, cv: 1.0e-200}\ntenants: {a: {}}")
    (tmp_path / "endless.csv").write_text("time,prompt_tokens,output_tokens\ninf,1,1\n")
    (tmp_path / "huge.csv").write_text(f"time,prompt_tokens,output_tokens\n1,{'9' * 400},1\n")
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
        ((str(tmp_path / "no.yaml"),), 2, "no.yaml: is no YAML: while parsing"),
        ((str(tmp_path / "day.yaml"),), 2, "day.yaml: is no YAML: month must be in 1..12"),
        ((str(tmp_path / "huge.yaml"),), 2, "huge.yaml: arrivals.rate: must be a number, not 9999"),
        ((str(tmp_path / "vanishing.yaml"),), 2, "vanishing.yaml: arrivals.cv: must be at least 0.01, not 1e-200"),
        ((*rate, "--arrivals", "gamma", "--cv", "1e200"), 2, "Invalid value for '--cv'"),
        ((*rate, "--timeout", "1e308"), 2, "Invalid value for '--timeout'"),
        ((*rate, "--drain", "nan"), 2, "Invalid value for '--drain'"),
        (("--rate", "5", "--duration", "inf"), 2, "Invalid value for '--duration'"),
        (("--rate", "5", "--requests", "9" * 400), 2, "--requests: must be a number, not 9999"),
        (("--trace", str(tmp_path / "endless.csv")), 2, "--trace: endless.csv: line 2: its time is not finite"),
        (("--trace", str(tmp_path / "huge.csv")), 2, "--trace: huge.csv: line 2: a count of tokens is not between"),
        ((*rate, "--url", f"http://{nobody}"), 1, "nobody answers there"),
    ):
        code, stderr = await told(manylora, *arguments)
        assert (code, words in stderr) == (exit_code, True), (arguments, stderr)
