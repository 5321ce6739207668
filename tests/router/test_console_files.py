"""The console's files: open to all, in nobody's frame, with nothing from elsewhere and nothing inline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from http_fakes import Front, http_front
from manylora_router.front.http.console import files

STATIC = Path(files.__file__).parent / "static"
PATHS = sorted(files._files())


async def get(front: Front, path: str, *headers: str) -> tuple[int, dict[str, str], bytes]:
    lines = [f"GET {path} HTTP/1.1", "host: x", "connection: close", *headers, "", ""]
    head, _, body = (await front.raw("\r\n".join(lines).encode())).partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in rest), body


async def test_every_file_is_served_without_a_key_and_with_its_guards() -> None:
    async with http_front() as front:
        for path in PATHS:
            status, headers, body = await get(front, path)
            assert (status, body) == (200, files._files()[path][0]), path
            for name, value in files.HEADERS.items():
                assert headers[name] == value.lower()
        assert (await get(front, "/console"))[1]["content-type"].startswith("text/html")
        for path in ("/console/nothing.js", "/console/../data.py", "/console/%2e%2e/data.py", "/consolex"):
            assert (await get(front, path))[0] in (400, 401, 404), path


def test_the_policy_permits_nothing_inline_and_nobody_else() -> None:
    policy = files.HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert re.findall(r"https?:|\*|data:|blob:", policy) == []


@pytest.mark.parametrize("file", sorted(STATIC.rglob("*.*")), ids=lambda file: file.name)
def test_files_read_no_markup_and_name_no_other_host(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    bad = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|setAttribute\(\"style|\son\w+=\""
    assert re.findall(bad, text) == []
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style| style=\"", text) == []
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_the_page_names_files_that_are_there() -> None:
    named = set()
    for file in STATIC.rglob("*.*"):
        named |= set(re.findall(r"[\"'](/console/[\w/]+\.\w+)[\"']", file.read_text(encoding="utf-8")))
    assert named <= set(PATHS)
    assert named | {"/console", "/console/"} == set(PATHS), "and none that nobody names"
