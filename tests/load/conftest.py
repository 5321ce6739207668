"""A server to be loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.load.openai_server import OpenAiServer, openai_server


@pytest.fixture
async def server() -> AsyncIterator[OpenAiServer]:
    async with openai_server() as running:
        yield running
