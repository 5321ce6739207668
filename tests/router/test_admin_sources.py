"""Sources of adapters: who may name which, what is refused before anything is asked, and what is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from manylora_router.admin import sources
from manylora_router.admin.sources import SourceRule, Sources, read_rules
from manylora_shared.errors import DeadlineExceeded, InvalidRequest, PermissionDenied, ServiceUnavailable
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from manylora_shared.stores.web_folder import WebFolder
from manylora_sim.adapter_files import MemoryAdapterFiles

from tests.web_site import CONTENT, Site, site_of


@pytest.fixture
def site() -> Iterator[Site]:
    with site_of() as found:
        yield found


@pytest.fixture
def made() -> Iterator[Sources]:
    rules = (
        SourceRule("s3://team-a/live/", frozenset({"a"})),
        SourceRule("https://models.example/a/", frozenset({"a"})),
        SourceRule("hf://team-a/", frozenset({"a"})),
        SourceRule("hf://open/", frozenset({"*"})),
    )
    found = Sources(rules, max_weights_bytes=4_000_000)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("url", "tenants"),
    [
        ("s3://team-a/live/x", "a"),
        ("s3://team-a/live", "a"),
        ("s3://team-a/lively/x", ""),
        ("s3://team-a/other", ""),
        ("s3://team-b/live/x", ""),
        ("https://models.example/a/x", "a"),
        ("https://models.example/ab", ""),
        ("https://models.example.evil/a/x", ""),
        ("hf://team-a/x@v1", "a"),
        ("hf://team-ab/x", ""),
        ("hf://open/x", "ab"),
    ],
)
def test_a_tenant_names_what_a_rule_lets_it(made: Sources, url: str, tenants: str) -> None:
    made.rule_for(url, "ops", is_operator=True)
    for tenant in "ab":
        if tenant in tenants:
            assert made.rule_for(url, tenant, is_operator=False) is not None
        else:
            with pytest.raises(PermissionDenied):
                made.rule_for(url, tenant, is_operator=False)


@pytest.mark.parametrize(
    "url",
    [
        *("s3://team-a/live/../other", "s3://team-a/live//x", "s3:///x", "s3://key:secret@team-a/live", "s3://a/b%2e"),
        *("https://models.example/a/../b", "https://u:p@models.example/a", "https://models.example/a?x=1", "https://"),
        *("https://models.example/a/%2e%2e/b", "https://Models.example/a", "http://models.example/a", "file:///etc"),
        *("https://[::1", "https://h:99999/x", "https://h:x/y", "https://h:0/x"),
        *("hf://team-a", "hf://../x", "hf://team-a/x@a/b", "gopher://x/", "s3://a/" + "x" * 2000, "s3://a/b\nc"),
    ],
)
def test_what_has_two_spellings_is_refused(made: Sources, url: str) -> None:
    for is_operator in (True, False):
        with pytest.raises(InvalidRequest):
            made.rule_for(url, "a", is_operator=is_operator)


async def bring(made: Sources, site: Site, monkeypatch: pytest.MonkeyPatch) -> MemoryAdapterFiles:
    monkeypatch.setattr(sources, "_open", lambda url, rule: WebFolder(f"{site.base}/a/", is_trusted=True))
    files = MemoryAdapterFiles()
    incoming = await files.begin()
    await made.bring("https://models.example/a", "a", is_operator=False, files=files, incoming=incoming)
    assert files.files[incoming] == {name.removeprefix("/a/"): content for name, content in CONTENT.items()}
    return files


async def test_files_are_brought_whole_or_refused(made: Sources, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await bring(made, site, monkeypatch)
    site.content[f"/a/{WEIGHTS_NAME}"] = b"x" * 4_000_001
    with pytest.raises(InvalidRequest, match="more than 4000000"):
        await bring(made, site, monkeypatch)
    del site.content[f"/a/{WEIGHTS_NAME}"]
    with pytest.raises(InvalidRequest, match="is missing"):
        await bring(made, site, monkeypatch)


async def test_a_source_that_stands_still_or_breaks_off_ends(
    made: Sources, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.lacking = 10
    monkeypatch.setattr(sources, "IDLE_S", 0.2)
    with pytest.raises(DeadlineExceeded, match="behind"):
        await bring(made, site, monkeypatch)
    site.is_over.set()
    with pytest.raises(ServiceUnavailable, match="broke off after 8 of 18"):
        await bring(made, site, monkeypatch)


async def test_a_mirror_of_the_hub_is_asked_in_its_place(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the hub does, it leads a file's name to where its content is."""
    (tmp_path / "token").write_text("hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", f"{site.base}/")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    rule = SourceRule("hf://team-a/", frozenset({"a"}), token=f"file:{tmp_path / 'token'}")
    made = Sources((rule,), max_weights_bytes=4_000_000)
    for revision, wanted in (("main", ""), ("v1", "@v1")):
        site.seen.clear()
        site.redirects = {f"/team-a/x/resolve/{revision}/{n}": f"/a/{n}" for n in (CONFIG_NAME, WEIGHTS_NAME)}
        files = MemoryAdapterFiles()
        incoming = await files.begin()
        await made.bring(f"hf://team-a/x{wanted}", "a", is_operator=False, files=files, incoming=incoming)
        assert files.files[incoming] == {name.removeprefix("/a/"): content for name, content in CONTENT.items()}
        assert {token for _, token in site.seen} == {"Bearer hf_secret"}
        assert {path for path, _ in site.seen if "resolve" in path} >= site.redirects.keys()
    with pytest.raises(PermissionDenied):
        await made.bring("hf://team-a/x", "b", is_operator=False, files=files, incoming=incoming)
    with pytest.raises(InvalidRequest, match="is missing"):
        await made.bring("hf://team-a/y", "a", is_operator=False, files=files, incoming=await files.begin())
    made.close()


def test_a_narrower_rule_keeps_out_whom_a_wider_one_lets_in() -> None:
    own = [SourceRule("s3://team/acme/", frozenset({name}), {"region": name}) for name in ("acme", "bolt")]
    made = Sources((SourceRule("s3://team/", frozenset({"*"})), *own))
    assert made.rule_for("s3://team/x", "crux", is_operator=False) is not None
    for tenant, rule in zip(("acme", "bolt"), own, strict=True):
        assert made.rule_for("s3://team/acme/x", tenant, is_operator=False) is rule
    for url in ("s3://team/acme", "s3://team/acme/", "s3://team/acme/x/y"):
        with pytest.raises(PermissionDenied):
            made.rule_for(url, "crux", is_operator=False)
    assert made.rule_for("s3://team/acme/x", "ops", is_operator=True) is own[0]
    made.close()


def test_rules_are_read_and_secrets_are_named_only(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("very-secret")
    path = tmp_path / "rules.yaml"
    good = f"- prefix: s3://a/b\n  tenants: [a]\n  access: {{access_key_id: 'file:{tmp_path}/key'}}\n"
    path.write_text(good)
    (rule,) = read_rules(str(path))
    assert (rule.prefix, rule.tenants) == ("s3://a/b/", frozenset("a"))
    assert "very-secret" not in repr(rule)
    for bad in ("a: 1", "- prefix: http://a", "- prefix: s3://a\n  token: abc", "- prefix: s3://a\n  tenants: a", "["):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"rules\.yaml"):
            read_rules(str(path))
