"""A served model and its draft model: whether they go together, and how the one is loaded beside the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from manylora_shared.stores.model_files import ModelNotFound, model_folder
from transformers import AutoTokenizer

from manylora_worker.models.checkpoint import ModelRefused, said
from manylora_worker.models.decoder.weights import DecoderWeights
from manylora_worker.models.loader import LoadedModel, load_model
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.kv_scales import with_fp8_kv


@dataclass(frozen=True)
class DraftParts:
    loaded: LoadedModel
    weights: DecoderWeights | None  # None: it runs as transformers wrote it


def load_draft(path: str, model: str, loaded: LoadedModel) -> tuple[LoadedModel, DraftParts]:
    """path: of the draft model; model: of the served one, loaded as `loaded`. Returns that with room for both in each
    KV block. Raises ModelRefused.
    """
    check_tokens(model_folder(model), path)
    draft = load_model(
        path, dtype=loaded.dtype, device=str(loaded.device), threads=loaded.num_threads,
        max_model_len=loaded.spec.max_context_tokens,
    )  # fmt: skip
    for each, name in ((loaded, "the model"), (draft, "the draft model")):
        if each.spec.kv.state is not None:
            raise ModelRefused(f"--draft-model {path}: {name} has recurrent layers, whose states cannot be taken back")
    weights = trusted_weights(draft)
    if loaded.spec.kv.scales:
        draft = with_fp8_kv(draft)
    kv = replace(loaded.spec.kv, beside=draft.spec.kv)
    return replace(loaded, spec=replace(loaded.spec, kv=kv)), DraftParts(draft, weights)


def check_tokens(model: Path, draft: str) -> None:
    """Raises ModelRefused where the draft model's tokens are others."""
    try:
        folder = model_folder(draft)
    except ModelNotFound as error:
        raise ModelRefused(f"--draft-model: {error}") from error
    ours, theirs = _tokens(model), _tokens(folder)
    missing, more = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    problem = f"--draft-model {draft}: its tokenizer is not the model's:"
    if missing:
        raise ModelRefused(f"{problem} it lacks {len(missing)} tokens, {missing[0]!r} among them")
    if more:
        raise ModelRefused(f"{problem} it has {len(more)} tokens more, {more[0]!r} among them")
    other = next((token for token in sorted(ours) if ours[token] != theirs[token]), None)
    if other is not None:
        raise ModelRefused(f"{problem} {other!r} is token {theirs[other]} there and {ours[other]} here")


def _tokens(folder: Path) -> dict[str, int]:
    try:
        found: dict[str, int] = AutoTokenizer.from_pretrained(str(folder), local_files_only=True).get_vocab()
    except (OSError, ValueError) as error:
        raise ModelRefused(f"--draft-model: {folder} has no tokenizer that can be read ({said(error)})") from error
    return found
