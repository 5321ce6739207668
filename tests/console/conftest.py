"""A cluster under load, and a headless Chromium: Debian's, or the one that CHROMIUM names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.console.served import Served, load, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("console")
    with served(folder / "data", log=folder / "stderr") as found, load(found):
        yield found


@pytest.fixture(scope="session")
def browser(cluster: Served) -> Iterator[Browser]:
    # After the cluster: while it is there, its event loop runs in this thread.
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert path, "no chromium: apt install chromium, or CHROMIUM=path"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def shots() -> Path | None:
    """Where screenshots go; None: nowhere."""
    folder = os.environ.get("CONSOLE_SHOTS")
    if not folder:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)
