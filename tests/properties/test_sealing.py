"""Sealed files: what was sealed comes back, and any change of the file is found."""

from __future__ import annotations

import dataclasses
import io
import itertools
import random
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.encryption import sealing
from manylora_shared.encryption.sealing import (
    MAGIC,
    SALT_BYTES,
    TAG_BYTES,
    DataKey,
    Header,
    NoKeys,
    OneKey,
    SealBroken,
    Sealed,
    SealedFile,
    Sealer,
    open_bytes,
    opened,
    seal,
)
from manylora_shared.errors import Code

CHUNK = 32
KEY = DataKey("acme", "0f" * 16, b"k" * 32)
KEYS = OneKey(KEY)
NAME = "adapter_model.safetensors"


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with patch.object(sealing, "CHUNK_BYTES", CHUNK):
        yield


def sealed_of(data: bytes, *, seed: int = 0, name: str = NAME, key: DataKey = KEY) -> bytes:
    return seal(data, name, key, random.Random(seed).randbytes(SALT_BYTES))


def parts_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


contents = st.binary(max_size=5 * CHUNK) | st.sampled_from([CHUNK, 2 * CHUNK, 3 * CHUNK]).map(bytes)


@given(contents, st.lists(st.integers(0, 500), max_size=6), st.lists(st.integers(0, 500), max_size=6))
def test_what_was_sealed_comes_back_however_it_is_cut(data: bytes, written: list[int], read: list[int]) -> None:
    parts: list[bytes] = []
    sealer = Sealer(parts.append, NAME, KEY, bytes(SALT_BYTES))
    for part in parts_of(data, written):
        sealer.add(part)
    sealer.end()
    stored = b"".join(parts)
    assert sealer.plain_bytes == len(data)
    assert b"".join(opened(parts_of(stored, read), NAME, KEYS)) == data
    header = Header.of(stored)
    assert header is not None
    assert header.plain_bytes(len(stored)) == len(data)


@given(contents, st.lists(st.tuples(st.integers(0, 6 * CHUNK), st.integers(0, 3 * CHUNK)), max_size=8))
def test_a_sealed_file_is_read_at_any_place(data: bytes, reads: list[tuple[int, int]]) -> None:
    file = SealedFile(io.BytesIO(sealed_of(data)), NAME, KEYS)
    buffered = io.BufferedReader(file, buffer_size=7)
    for place, size in reads:
        buffered.seek(place)
        assert buffered.read(size) == data[place : place + size]
    whole = bytearray(len(data))
    buffered.seek(0)
    assert buffered.readinto(whole) == len(data)
    assert (bytes(whole), buffered.read(1)) == (data, b"")


@st.composite
def tamperings(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A sealed file's content, and the file as somebody has changed it."""
    data = draw(st.binary(min_size=1, max_size=5 * CHUNK))
    stored = sealed_of(data)
    first = len(stored) - len(data) - TAG_BYTES * (1 + (len(data) - 1) // CHUNK)
    body = [stored[i : i + CHUNK + TAG_BYTES] for i in range(first, len(stored), CHUNK + TAG_BYTES)]
    foreign = sealed_of(draw(st.binary(min_size=1, max_size=5 * CHUNK)), seed=1)
    match draw(st.sampled_from(["flip", "cut", "append", "drop", "swap", "repeat", "splice", "whole-chunks"])):
        case "flip":
            place, bit = draw(st.integers(0, len(stored) - 1)), draw(st.integers(0, 7))
            changed = stored[:place] + bytes([stored[place] ^ 1 << bit]) + stored[place + 1 :]
        case "cut":
            changed = stored[: draw(st.integers(0, len(stored) - 1))]
        case "append":
            changed = stored + draw(st.binary(min_size=1, max_size=2 * CHUNK))
        case "drop":
            gone = draw(st.integers(0, len(body) - 1))
            changed = stored[:first] + b"".join(body[:gone] + body[gone + 1 :])
        case "swap":
            order = draw(st.permutations(range(len(body))))
            changed = stored[:first] + b"".join(body[i] for i in order)
        case "repeat":
            again = draw(st.integers(0, len(body) - 1))
            changed = stored[:first] + b"".join(body[: again + 1] + body[again:])
        case "splice":
            changed = stored[:first] + foreign[first:]
        case _:
            changed = stored[: first + (CHUNK + TAG_BYTES) * draw(st.integers(0, len(body) - 1))]
    if changed == stored:
        changed = stored[:-1]
    return data, changed


@given(tamperings())
def test_any_change_of_a_sealed_file_is_found(case: tuple[bytes, bytes]) -> None:
    data, changed = case
    if not changed.startswith(MAGIC):  # it is no sealed file any more, and is taken for what it is
        assert open_bytes(changed, NAME, KEYS) == changed != data
        return
    with pytest.raises((SealBroken, Sealed)):
        open_bytes(changed, NAME, KEYS)
    with pytest.raises((SealBroken, Sealed)):
        SealedFile(io.BytesIO(changed), NAME, KEYS).readall()


def test_damage_in_the_store_is_no_fault_of_who_asks() -> None:
    for cut in (len(MAGIC) + 1, len(sealed_of(b"")) - 1):
        with pytest.raises(SealBroken) as caught:
            open_bytes(sealed_of(b"")[:cut], NAME, KEYS)
        assert caught.value.code is Code.DATA_LOSS
        assert caught.value.http.status == 500
    assert Sealed("its key is gone").http.status == 500


@given(contents)
def test_a_file_under_another_name_or_key_does_not_open(data: bytes) -> None:
    stored = sealed_of(data)
    with pytest.raises(SealBroken):
        open_bytes(stored, "adapter_config.json", KEYS)
    with pytest.raises(SealBroken):
        open_bytes(stored, NAME, OneKey(dataclasses.replace(KEY, secret=b"x" * 32)))
    for other in (dataclasses.replace(KEY, owner="other"), dataclasses.replace(KEY, key_id="aa" * 16)):
        with pytest.raises(Sealed):
            open_bytes(stored, NAME, OneKey(other))
    with pytest.raises(Sealed, match="--encryption"):
        open_bytes(stored, NAME, NoKeys())


@given(st.binary(min_size=12, max_size=2 * CHUNK))
def test_nothing_of_the_content_or_the_key_is_in_the_file(data: bytes) -> None:
    key = DataKey("acme", "0f" * 16, data.ljust(32, b"!")[:32])
    stored = sealed_of(data, key=key)
    assert data not in stored
    assert key.secret not in stored
    assert repr(key.secret) not in repr(key)
    assert sealed_of(data, key=key, seed=1) != stored


def test_a_plain_file_is_read_as_it_is() -> None:
    assert open_bytes(b"{}", NAME, NoKeys()) == b"{}"
    assert open_bytes(b"", NAME, NoKeys()) == b""
