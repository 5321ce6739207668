from __future__ import annotations

import json

from manylora.reports.usage_rows import as_csv, as_json


def test_rows_are_text() -> None:
    rows = [{"tenant": "é", "prompt_tokens": 1}, {"tenant": "-1+1", "prompt_tokens": 2}]
    assert json.loads(as_json(rows)) == rows
    assert as_csv(rows) == "tenant,prompt_tokens\né,1\n'-1+1,2\n"
    assert (as_json([]), as_csv([])) == ("[]\n", "")
