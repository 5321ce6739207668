"""The text of tests: a token a byte, there and back."""

from __future__ import annotations

from manylora_sim.fake_text import FakeText


def test_text_comes_back_however_its_bytes_are_cut() -> None:
    text = FakeText()
    ids = text.ids("aé€😀")
    for size in (1, 2, 3, 100):
        detokenizer = text.detokenizer()
        pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
        assert "".join(pieces) + detokenizer.finish() == "aé€😀"


def test_ids_below_the_bytes_have_no_text_and_half_a_character_is_told_at_the_end() -> None:
    detokenizer = FakeText().detokenizer()
    assert detokenizer.push([0, 1, 2, 300]) == ""
    assert detokenizer.push(FakeText().ids("é")[:1]) == ""
    assert detokenizer.finish() == "\ufffd"
