"""Texts of pools are loaded when they are first asked for, once."""

from __future__ import annotations

import asyncio

import pytest
from manylora_router.text.service import TextService, TokenIdsOnlyText
from manylora_router.text.texts import Texts
from manylora_shared.errors import Unready
from manylora_sim.fake_text import FakeText


async def test_a_text_is_loaded_once_and_when_it_is_asked_for() -> None:
    default, loads = FakeText(), 0

    def load() -> TextService:
        nonlocal loads
        loads += 1
        return FakeText(first_byte_id=9)

    texts = Texts(default, {"small": load})
    assert await texts.of("default") is default
    assert loads == 0
    first, again = await asyncio.gather(texts.of("small"), texts.of("small"))
    assert first is again is await texts.of("small") is texts.known("small")
    assert loads == 1
    await texts.close()


async def test_a_pool_that_the_router_was_told_nothing_of_takes_token_ids() -> None:
    texts = Texts(FakeText())
    assert isinstance(await texts.of("other"), TokenIdsOnlyText)
    assert await texts.of("other") is texts.known("other")


async def test_a_tokenizer_that_cannot_be_read_is_tried_again() -> None:
    found: list[TextService] = []

    def load() -> TextService:
        if not found:
            raise OSError("no such folder")
        return found[0]

    texts = Texts(FakeText(), {"small": load})
    with pytest.raises(Unready, match="this router cannot read the tokenizer of pool small"):
        await texts.of("small")
    found.append(FakeText())
    assert await texts.of("small") is found[0]


async def test_who_leaves_does_not_end_the_loading() -> None:
    texts = Texts(FakeText(), {"small": FakeText})
    leaving = asyncio.create_task(texts.of("small"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert isinstance(await texts.of("small"), FakeText)
    await texts.close()
