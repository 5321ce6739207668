"""`manylora load` on a running cluster: tenants by an operator's key, adapters by Zipf, open and closed loops."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

MIX = """\
url: http://{http}
duration_s: 3
slo: {{e2e_ms: 60000}}
arrivals: {{kind: gamma, rate: 15, cv: 2}}
tenants:
  acme:
    <<: &all {{key: "file:{key}", prompt_tokens: 40, output_tokens: 24}}
    tenant_id: acme
    class: interactive
    share: 2
    adapters: [upper, reverse]
  birch: {{<<: *all, tenant_id: birch, adapters: [words], base_part: 0.5, arrivals: {{kind: closed, streams: 2}}}}
  thief: {{<<: *all, tenant_id: birch, adapters: [upper]}}
"""


async def test_a_mix_is_served_and_another_tenants_adapter_is_not(whole: UpCluster, tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text(MIX.format(http=whole.ready["http"], key=whole.ready["key_file"]))
    out = await whole.manylora("load", str(tmp_path / "mix.yaml"), "--json")
    assert out.exit_code == 0, out.stderr
    acme, birch, thief = (out.json["tenants"][name] for name in ("acme", "birch", "thief"))
    assert not acme["errors"]
    assert not birch["errors"]
    assert acme["good_part"] == birch["good_part"] == 1
    assert acme["output_tokens"] == 24 * acme["completed"] > 0
    assert acme["prompt_tokens"] == pytest.approx(40 * acme["completed"], rel=0.3)  # of words, as the server counts
    assert 0 < acme["ttft_ms"]["p50"] <= acme["e2e_ms"]["p50"]
    assert list(thief["errors"]) == ["404 not_found"]
    assert thief["completed"] == 0
