"""`manylora certs`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from manylora.cli.output import say, usage_error
from manylora.local import certs


def init(folder: Path, hosts: Sequence[str]) -> None:
    try:
        certs.make(folder, hosts, datetime.datetime.now(datetime.UTC))
    except (OSError, ValueError) as e:
        raise usage_error(str(e)) from None
    say(f"services: --tls-cert {folder / certs.CERT} --tls-key {folder / certs.KEY} --tls-ca {folder / certs.CA}")
    say(f"clients:  --tls-ca {folder / certs.CA}, or MANYLORA_TLS_CA")
