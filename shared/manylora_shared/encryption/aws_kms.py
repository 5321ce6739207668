"""AWS's key service as a KeyService. It rotates its own key material; what was wrapped before still opens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora_shared.encryption.key_service import KeyServiceUnavailable, Wrapped, context_of
from manylora_shared.encryption.sealing import Sealed

_TIMEOUT_S = 5
_TRIES = 3
_NOT_ITS = ("InvalidCiphertextException", "IncorrectKeyException")


class AwsKeys:
    """settings: as of a bucket's access file; what they leave out is AWS_* of the environment."""

    def __init__(self, key_id: str, settings: Mapping[str, str]) -> None:
        """Raises ValueError."""
        try:
            import botocore.session
            from botocore.config import Config
        except ImportError:
            raise ValueError("aws-kms needs botocore: pip install 'manylora[aws]'") from None
        self._key_id = key_id
        region = settings.get("region") or _region_of(key_id)
        self._client: Any = botocore.session.get_session().create_client(
            "kms",
            region_name=region,
            endpoint_url=settings.get("endpoint"),
            aws_access_key_id=settings.get("access_key_id"),
            aws_secret_access_key=settings.get("secret_access_key"),
            aws_session_token=settings.get("session_token"),
            config=Config(connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, retries={"total_max_attempts": _TRIES}),
        )

    def wrap(self, secret: bytes, owner: str) -> Wrapped:
        answer = self._call("encrypt", KeyId=self._key_id, Plaintext=secret, EncryptionContext=context_of(owner))
        return Wrapped(answer["KeyId"], answer["CiphertextBlob"])

    def unwrap(self, wrapped: Wrapped, owner: str) -> bytes:
        answer = self._call("decrypt", CiphertextBlob=wrapped.data, EncryptionContext=context_of(owner))
        return bytes(answer["Plaintext"])

    def current(self) -> str:
        return str(self._call("describe_key", KeyId=self._key_id)["KeyMetadata"]["Arn"])

    def rotate(self) -> None:
        """The key's material, where the service rotates it on demand. An alias may also be pointed elsewhere."""
        self._call("rotate_key_on_demand", KeyId=self.current())

    def forget_others(self) -> bool:
        return False  # AWS keeps old key material as long as the key

    def _call(self, name: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client, name)(**arguments)
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in _NOT_ITS:
                raise Sealed(
                    "AWS KMS does not open a data key: it is another owner's, or another key wrapped it"
                ) from None
            raise KeyServiceUnavailable(f"AWS KMS refuses {name}: {code}") from None
        except BotoCoreError as error:
            raise KeyServiceUnavailable(f"AWS KMS does not answer: {type(error).__name__}") from None


def _region_of(key_id: str) -> str | None:
    parts = key_id.split(":")
    return parts[3] if len(parts) > 3 and parts[0] == "arn" else None
