"""AWS's key service, against its emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from manylora_shared.encryption.aws_kms import AwsKeys
from manylora_shared.encryption.key_service import KeyServiceUnavailable, Wrapped
from manylora_shared.encryption.sealing import Sealed

from tests.s3_server import S3Server, running

pytestmark = pytest.mark.long
SECRET = b"s" * 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running(tmp_path_factory.mktemp("aws")) as server:
        yield server


def made_key(server: S3Server) -> str:
    client: Any = botocore.session.get_session().create_client(
        "kms",
        region_name="eu-west-1",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.settings["access_key_id"],
        aws_secret_access_key=server.settings["secret_access_key"],
    )
    return str(client.create_key()["KeyMetadata"]["Arn"])


def test_data_keys_are_wrapped_by_aws(server: S3Server) -> None:
    arn = made_key(server)
    keys = AwsKeys(arn, {**server.settings, "region": "eu-west-1"})
    wrapped = keys.wrap(SECRET, "acme")
    assert wrapped.by == keys.current() == arn
    assert SECRET not in wrapped.data
    assert keys.unwrap(wrapped, "acme") == SECRET
    with pytest.raises(Sealed):
        keys.unwrap(wrapped, "other")
    with pytest.raises(Sealed):
        keys.unwrap(Wrapped(wrapped.by, wrapped.data[:-1] + b"x"), "acme")
    keys.rotate()
    assert keys.unwrap(wrapped, "acme") == SECRET
    assert not keys.forget_others()


def test_what_aws_refuses_is_told_without_secrets(server: S3Server, tmp_path: Path) -> None:
    arn = made_key(server).rpartition("/")[0] + "/00000000-0000-0000-0000-000000000000"
    with pytest.raises(KeyServiceUnavailable, match="NotFoundException") as failed:
        AwsKeys(arn, server.settings).wrap(SECRET, "acme")
    assert server.settings["secret_access_key"] not in str(failed.value)
    with pytest.raises(KeyServiceUnavailable, match="does not answer"):
        AwsKeys(arn, {**server.settings, "endpoint": "http://127.0.0.1:9"}).wrap(SECRET, "acme")
