"""What `manylora up` is told becomes the cluster's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from manylora.cli import cluster
from manylora.cli.app import app
from manylora.local.cluster import ClusterOptions
from typer.testing import CliRunner


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ClusterOptions, Path | None]]:
    found: list[tuple[ClusterOptions, Path | None]] = []

    async def up(*given: Any) -> None:
        found.append(given)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster, "up", up)
    return found


def test_options_reach_the_cluster(asked: list[tuple[ClusterOptions, Path | None]]) -> None:
    arguments = ["up", "--model", "demo", "--port", "7100", "--workers", "2", "--quantization", "nf4", "--tls"]
    arguments += ["--model-alias", "b", "--tool-parser", "qwen-coder", "--reasoning-parser", "think"]
    arguments += ["--draft-model", "demo", "--kv-cache-dtype", "fp8"]
    out = CliRunner().invoke(app, [*arguments, "--generation-config", "none"])
    assert out.exit_code == 0, out.output
    [(options, tenants)] = asked
    assert tenants is None
    assert (options.port, options.http_port, options.workers, options.model_aliases) == (7100, 7110, 2, ("b",))
    assert (options.quantization, options.generation_config, options.tls) == ("nf4", "none", True)
    assert options.draft_model == str(options.model)
    assert options.kv_cache_dtype == "fp8"
    assert (options.tool_parser, options.reasoning_parser) == ("qwen-coder", "think")


def test_a_parser_that_is_none_is_refused(asked: list[tuple[ClusterOptions, Path | None]]) -> None:
    out = CliRunner().invoke(app, ["up", "--model", "demo", "--tool-parser", "xml"])
    assert (out.exit_code, asked) == (2, [])
    assert "xml" in out.output
