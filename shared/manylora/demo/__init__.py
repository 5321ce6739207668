"""The demo: a small trained model, four tenants' adapters, and the run that proves who answered."""

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
BASE_FOLDER = ASSETS / "base"
BASE_NAME = "manylora-demo-base"


def adapter_folder(adapter: str) -> Path:
    return ASSETS / "adapters" / adapter
