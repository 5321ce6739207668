from __future__ import annotations

from manylora.load.planning.prompts import Words, ids, words_from
from manylora.load.planning.schedule import Piece


def test_words_are_as_many_as_the_server_counts() -> None:
    words = words_from(8, 21, 72, 149)  # two a word, and five
    assert words == Words(2.0, 5.0)
    text = words.text([Piece("p", 40), Piece("x", 65)])
    assert 5 + 2 * len(text.split()) == 105
    assert text == words.text([Piece("p", 40), Piece("x", 65)])
    assert text.split()[:20] == words.text([Piece("p", 40), Piece("y", 9)]).split()[:20]
    assert len(words.text([Piece("x", 1)]).split()) == 1


def test_ids_are_exact_and_in_every_vocabulary() -> None:
    found = ids([Piece("p", 3), Piece("x", 4)])
    assert len(found) == 7
    assert found[:3] == ids([Piece("p", 3)])
    assert all(10 <= token_id < 250 for token_id in found)
