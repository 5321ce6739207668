"""The key that signs the audit log, in a file; beside one that is made here lies a file with the public key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from manylora_shared.audit.entries import Signer
from manylora_shared.coordination.peers import make_secret, read_secret
from manylora_shared.telemetry.logs import hide


def signer_of(path: Path, getrandbits: Callable[[int], int]) -> Signer:
    """Makes the file where there is none, of mode 0600. Raises OSError, or ValueError where it holds no key."""
    is_made = not path.exists()
    if is_made:
        make_secret(path, f"{getrandbits(256):064x}\n")
    text = read_secret(path)
    try:
        signer = Signer(bytes.fromhex(text))
    except ValueError:
        raise ValueError(f"{path}: holds no key of the audit log: 64 hexadecimal digits are expected") from None
    hide(text)
    if is_made:
        path.with_name(path.name + ".pub").write_text(signer.public_key + "\n", encoding="ascii")
    return signer
