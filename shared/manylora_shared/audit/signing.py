"""The key that signs the audit log, in a file that its owner alone can read; beside it a file with the public key."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from manylora_shared.audit.entries import Signer
from manylora_shared.coordination.peers import make_secret
from manylora_shared.telemetry.logs import hide

_PRIVATE = 0o077
_MAX_BYTES = 4096


def signer_of(path: Path, getrandbits: Callable[[int], int]) -> Signer:
    """Makes the file where there is none. Raises OSError, or ValueError where it holds no key."""
    if not path.exists():
        make_secret(path, f"{getrandbits(256):064x}\n")
    with path.open(encoding="ascii", errors="replace") as file:
        if os.fstat(file.fileno()).st_mode & _PRIVATE:
            raise PermissionError(f"{path}: others may read it; its mode must be 0600")
        text = file.read(_MAX_BYTES).strip()
    try:
        signer = Signer(bytes.fromhex(text))
    except ValueError:
        raise ValueError(f"{path}: holds no key of the audit log: 64 hexadecimal digits are expected") from None
    hide(text)
    public = path.with_name(path.name + ".pub")
    if not public.exists():
        public.write_text(signer.public_key + "\n", encoding="ascii")
    return signer
