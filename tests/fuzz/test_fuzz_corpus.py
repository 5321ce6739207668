"""Every input of the fuzzers' corpora, those that once broke a parser too."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator

import pytest

from tests.fuzz import router
from tests.fuzz.harness import CORPUS, NAMES, check, corpus_of, load
from tests.fuzz.mutation import mutated


@pytest.fixture(scope="module", autouse=True)
def _router_ends() -> Iterator[None]:
    yield
    router.end()


@pytest.mark.parametrize("name", NAMES)
def test_corpus_breaks_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    harness = load(name)
    for path in corpus_of(name):
        try:
            check(harness, path.read_bytes(), slack=4.0)
        except Exception as error:
            error.add_note(str(path.relative_to(CORPUS)))
            raise


def test_corpora_are_small() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(NAMES)
    assert sum(path.stat().st_size for path in CORPUS.glob("*/*")) < 300_000


def test_changed_documents_are_documents() -> None:
    rng, words, data = random.Random(1), [], b'{"a": [1, {"b": "text"}], "c": null}'
    seen = set()
    for _ in range(300):
        changed = mutated(data, rng, words)
        assert changed is not None
        json.loads(changed)
        seen.add(changed)
    assert len(seen) > 100
    assert mutated(b"{", rng, words) is None
