"""Anthropic's own client against the real model."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from conftest import Served

from tests.real_model import CAPITAL, LEARNED, MAX_TOKENS

pytestmark = pytest.mark.clients

MESSAGES: Any = CAPITAL


@pytest.mark.parametrize("adapter", LEARNED)
def test_messages(served: Served, adapter: str) -> None:
    with anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": adapter,
            "messages": MESSAGES,
            "max_tokens": MAX_TOKENS,
            "extra_body": {"temperature": 0},
        }
        answer: Any = client.messages.create(**asked)
        assert [part.text for part in answer.content] == [LEARNED[adapter]]
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == LEARNED[adapter]
        counted = client.messages.count_tokens(model=adapter, messages=MESSAGES)
        # As Anthropic counts: what the prefix cache had is told apart.
        assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**asked, "model": "nobody"})
