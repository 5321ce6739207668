"""A served model and a draft model that do not go together are refused by what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from manylora_worker.config import WorkerConfig
from manylora_worker.models.build import build_engine
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.drafts.pairs import check_tokens

from tests.numerics.conftest import FamilyOf
from tests.numerics.test_drafter import with_words


def test_a_model_of_other_tokens_is_refused_by_what_differs(family_of: FamilyOf, tmp_path: Path) -> None:
    family = family_of("llama")
    model = with_words(tmp_path / "model", family.folder)
    other = with_words(tmp_path / "other", family.folder)
    file = other / "tokenizer.json"
    raw = json.loads(file.read_text())
    words = raw["model"]["vocab"]

    def refusal(**changed: int) -> str:
        raw["model"]["vocab"] = {**words, **changed}
        file.write_text(json.dumps(raw))
        with pytest.raises(ModelRefused) as refused:
            check_tokens(model, str(other))
        return str(refused.value).partition(": its tokenizer is not the model's: ")[2]

    check_tokens(model, str(other))
    assert refusal(w5=6, w6=5) == "'w5' is token 6 there and 5 here"
    assert refusal(more=len(words)) == "it has 1 tokens more, 'more' among them"
    with pytest.raises(ModelRefused, match="--draft-model"):
        check_tokens(model, str(tmp_path / "nowhere"))


def test_ranks_take_no_draft_model(family_of: FamilyOf, tmp_path: Path) -> None:
    folder = str(family_of("llama").folder)
    with pytest.raises(ModelRefused, match="--draft-model: not with --tensor-parallel"):
        build_engine(WorkerConfig(model=folder, draft_model=folder, tensor_parallel=2, device="cpu"))


def test_a_model_with_states_takes_no_draft_model(family_of: FamilyOf, tmp_path: Path) -> None:
    model = with_words(tmp_path / "model", family_of("qwen3_5_text").folder)
    with pytest.raises(ModelRefused, match="the model has recurrent layers"):
        build_engine(WorkerConfig(model=str(model), draft_model=str(model), device="cpu", num_blocks=200))
