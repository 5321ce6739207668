"""Files below an address that a tenant named: where it may lead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from manylora_shared.errors import InvalidRequest
from manylora_shared.stores.adapter_files import CONFIG_NAME
from manylora_shared.stores.web_folder import WebFolder, is_public

from tests.web_site import CONTENT, Site, site_of


@pytest.fixture
def site() -> Iterator[Site]:
    with site_of() as found:
        yield found


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((a, False) for a in ("127.0.0.1", "10.1.2.3", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0")),
        *((a, False) for a in ("::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::")),
        *((a, False) for a in ("224.0.0.1", "ff0e::1", "::")),
        *((a, True) for a in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8")),
    ],
)
def test_which_addresses_are_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


def test_a_private_host_is_not_dialled_unless_an_operator_chose_it(site: Site) -> None:
    with pytest.raises(InvalidRequest, match="not https"):
        WebFolder(f"{site.base}/a/").open(CONFIG_NAME)
    with pytest.raises(InvalidRequest, match="public internet"):
        WebFolder(f"{site.base.replace('http', 'https')}/a/").open(CONFIG_NAME)
    assert site.seen == []
    folder = WebFolder(f"{site.base}/a/", is_trusted=True)
    opened = folder.open(CONFIG_NAME)
    assert opened is not None
    assert b"".join(opened[1]) == CONTENT[f"/a/{CONFIG_NAME}"]
    folder.close()


UNREAL = ("https://host:99999/x", "https://[::1/x", "https://[x]/y", "/a/ü", "/a b")


def test_a_redirect_leads_to_no_other_private_host_and_carries_no_token(site: Site) -> None:
    folder = WebFolder(f"{site.base}/a/", token="secret", is_trusted=True)
    with site_of() as other:
        for target in (
            f"{other.base}/a/{CONFIG_NAME}",
            f"{other.base.replace('http', 'https')}/a/x",
            "file:///etc/x",
            *UNREAL,
        ):
            site.redirects = {f"/a/{CONFIG_NAME}": target}
            with pytest.raises(InvalidRequest):
                folder.open(CONFIG_NAME)
        assert other.seen == []
    site.redirects = {f"/a/{CONFIG_NAME}": f"/a/{CONFIG_NAME}"}
    with pytest.raises(InvalidRequest, match="redirects"):
        folder.open(CONFIG_NAME)
    site.redirects = {}
    assert folder.open("none") is None
    assert site.seen[-1] == ("/a/none", "Bearer secret")
    folder.close()
