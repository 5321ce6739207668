"""The text of one choice of a request, up to a stop string, however its tokens come in frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manylora_router.text.detokenizer import Detokenizer
from manylora_router.text.stop_strings import StopStringMatcher, StopStrings


@dataclass(slots=True)  # not frozen: that would double the time that making one takes
class TextDelta:
    text: str
    num_tokens: int  # delivered: all, or up to the one that completed a stop string
    stop_string: str | None = None


class ChoiceText:
    """It takes no tokens after a stop string or `finish`. None of the first `min_tokens` ends a stop string."""

    __slots__ = ("_detokenizer", "_matcher", "_tokens_past")

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings | None, min_tokens: int = 0) -> None:
        self._tokens_past = -min_tokens
        self._detokenizer = detokenizer
        self._matcher = StopStringMatcher(stops) if stops is not None else None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        matcher = self._matcher
        if matcher is None:
            return TextDelta(self._detokenizer.push(token_ids), len(token_ids))
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            text = self._detokenizer.push((token_id,))  # one by one: the token that completes a match is the last
            self._tokens_past += 1
            if text:
                pieces.append(matcher.push(text, may_match=self._tokens_past > 0))
                if matcher.matched is not None:
                    return TextDelta("".join(pieces), index + 1, matcher.matched)
        return TextDelta("".join(pieces), len(token_ids))

    def finish(self) -> TextDelta:
        text = self._detokenizer.finish()
        matcher = self._matcher
        if matcher is None:
            return TextDelta(text, 0)
        text = matcher.push(text, may_match=self._tokens_past > 0)
        if matcher.matched is not None:
            return TextDelta(text, 0, matcher.matched)
        return TextDelta(text + matcher.finish(), 0)
