"""Addresses of buckets. What one does is in test_bucket_files.py, against a real server."""

from __future__ import annotations

import pytest
from manylora_shared.stores.bucket import is_bucket, split_url


def test_addresses() -> None:
    assert split_url("s3://b/a/c/") == ("b", "a/c")
    assert split_url("s3://b") == ("b", "")
    assert is_bucket("s3://b")
    assert not is_bucket("/s3")


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///x", "/x", "s3://b/../c", "s3://b//c", "s3://k:s@b/c", "s3://b/c?x", "s3://b/%2e"]
)
def test_what_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="must"):
        split_url(url)
