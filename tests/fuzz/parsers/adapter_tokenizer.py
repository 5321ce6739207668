"""The tokenizer and chat template that an adapter's folder brings."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from manylora_shared.errors import InvalidRequest
from manylora_shared.stores.adapter_tokenizer import FILE_NAMES, brought_by, differences

from tests.fuzz.harness import Harness

_FOLDER = Path(tempfile.mkdtemp(prefix="manylora-fuzz-"))


def run(data: bytes) -> None:
    """{file name: its document, or its text}"""
    try:
        given = json.loads(data)
        files = {name: given[name] for name in FILE_NAMES if name in given}
    except (ValueError, TypeError, RecursionError):
        return
    for name in FILE_NAMES:
        (_FOLDER / name).unlink(missing_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (_FOLDER / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    found = differences(brought_by(_FOLDER, follows_links=False), "{{ messages }}", {"<s>": 1, "</s>": 2})
    if found:
        raise InvalidRequest.of_all(found)


HARNESS = Harness(run, is_json=True)
