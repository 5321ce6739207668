from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.encryption.keyring import CLUSTER
from manylora_shared.encryption.names import UNREADABLE, NameSeal

from tests.sealing_keys import MemoryKeys

KEYS = MemoryKeys()


@given(st.text(max_size=80), st.text(max_size=80), st.sampled_from(["acme", CLUSTER]))
def test_equal_texts_of_one_owner_and_title_are_equal_and_no_others(one: str, other: str, owner: str) -> None:
    names = NameSeal(KEYS)
    sealed = names.seal(owner, "adapter", one)
    assert (names.seal(owner, "adapter", other) == sealed) == (one == other)
    assert names.open("acme", "adapter", sealed) == one
    if one:
        assert sealed != one
        assert names.seal("globex", "adapter", one) != sealed
        assert names.seal(owner, "key", one) != sealed
        assert names.open("acme", "key", sealed) == UNREADABLE


@given(st.text(max_size=120))
def test_what_is_not_sealed_stays_and_what_is_forged_opens_nothing(text: str) -> None:
    assert NameSeal(KEYS).open("acme", "key", text) in (text, UNREADABLE)
    assert NameSeal(KEYS).open("acme", "key", f"~t{text}") == UNREADABLE
    assert NameSeal(None).seal("acme", "key", text) == text


def test_a_destroyed_key_opens_nothing_more() -> None:
    keys = MemoryKeys()
    names = NameSeal(keys)
    sealed = names.seal("acme", "adapter", "support")
    assert NameSeal(None).open("acme", "adapter", sealed) == UNREADABLE
    keys.destroy("acme")
    assert names.open("acme", "adapter", sealed) == UNREADABLE
    assert names.seal("acme", "adapter", "support") != sealed
    assert names.open("acme", "adapter", sealed) == UNREADABLE


@pytest.mark.parametrize("change", [lambda text: text[:-2], lambda text: text[:30] + "AAAA" + text[34:]])
def test_a_changed_text_opens_nothing(change: object) -> None:
    names = NameSeal(KEYS)
    assert names.open("acme", "adapter", change(names.seal("acme", "adapter", "support"))) == UNREADABLE  # type: ignore[operator]
