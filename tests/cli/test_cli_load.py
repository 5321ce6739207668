"""`manylora load` against a server."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.cli.conftest import Manylora
from tests.load.openai_server import OpenAiServer, openai_server

MIX = """\
url: {url}
prompts: ids
arrivals: {{kind: trace, file: trace.csv.gz}}
tenants:
  acme: {{share: 2, key: "file:{key}"}}
  birch: {{key: "env:BIRCH"}}
"""


async def test_one_tenant_by_flags(manylora: Manylora) -> None:
    async with openai_server() as server:
        call = ("load", "--url", server.url + "/v1", "--key", "k", "--requests", "12", "--rate", "200")
        out = await manylora(*call, "--adapter", "lora-a", "--prompt-tokens", "9-20", "--output-tokens", "3", "--json")
        assert out.exit_code == 0, out.stderr
        assert out.json["total"]["completed"] == 12
        assert out.json["tenants"]["load"]["output_tokens"] == 36
        assert {body["model"] for _, body in server.asked[2:]} == {"lora-a"}
        table = await manylora("load", "--url", server.url, "--streams", "2", "--requests", "4", "--chat")
        assert "TTFT p50" in table.stdout
        assert table.exit_code == 0


async def test_a_mix_file_with_a_trace_and_keys_of_its_own(
    manylora: Manylora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIRCH", "of-birch")
    rows = "".join(f"{number / 100},5,2\n" for number in range(30))
    (tmp_path / "trace.csv.gz").write_bytes(gzip.compress(f"time,prompt_tokens,output_tokens\n{rows}".encode()))
    (tmp_path / "key").write_text("of-acme\n")
    async with openai_server() as server:
        (tmp_path / "mix.yaml").write_text(MIX.format(url=server.url, key=tmp_path / "key"))
        out = await manylora("load", str(tmp_path / "mix.yaml"), "--requests", "20", "--json")
        assert out.exit_code == 0, out.stderr
        assert out.json["total"]["completed"] == 20
        assert out.json["tenants"]["acme"]["completed"] > out.json["tenants"]["birch"]["completed"] > 0
        assert {headers["authorization"] for headers, _ in server.asked} == {"Bearer of-acme", "Bearer of-birch"}
    assert "of-acme" not in out.stdout + out.stderr


async def test_where_nothing_is_answered_it_fails(manylora: Manylora) -> None:
    async with openai_server() as server:
        server.cut_after = 0
        out = await manylora("load", "--url", server.url, "--streams", "1", "--requests", "2", "--prompt-ids", "--json")
    assert out.exit_code == 1
    assert out.json["total"]["errors"] == {"connection lost": 2}
    assert isinstance(server, OpenAiServer)
