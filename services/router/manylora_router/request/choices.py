"""The choices of one request: the worker's tokens become deltas of text, until each choice has its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.errors import InternalError, InvalidRequest

from manylora_router.request.frames import ChoiceEnd, Delta, Frame
from manylora_router.text.choice_text import ChoiceText
from manylora_router.text.detokenizer import Detokenizer
from manylora_router.text.stop_strings import StopStrings


@dataclass(eq=False, slots=True)
class _Choice:
    text: ChoiceText
    token_ids: list[int] = field(default_factory=list)
    end: ChoiceEnd | None = None
    late: str = ""  # of tokens that the caller has
    known: int = 0  # characters that the caller has, and that come yet


@dataclass(slots=True)
class Taken:
    """Deltas in order, and the choices that met a stop string just now and that the worker would go on with."""

    deltas: list[Frame]
    stopped: list[int]


class Choices:
    def __init__(
        self,
        detokenizers: Sequence[Detokenizer],
        stop: StopStrings | None,
        min_tokens: int = 0,
        stop_tokens: Mapping[int, str] | None = None,
    ) -> None:
        """`detokenizers`: a fresh one for each choice; `stop_tokens`: stop strings that are a token, by its id."""
        self._stop_tokens = stop_tokens or {}
        self._choices = [_Choice(ChoiceText(d, stop, min_tokens)) for d in detokenizers]
        self._is_cut_short = False
        self.num_tokens = 0

    def goes_on(self, choice: int) -> bool:
        return choice < len(self._choices) and self._choices[choice].end is None

    @property
    def have_ended(self) -> bool:
        return all(choice.end is not None for choice in self._choices)

    @property
    def are_cut_short(self) -> bool:
        """All have ended, not all by the worker: it has not said yet that the request is over."""
        return self._is_cut_short and self.have_ended

    def lengths(self) -> list[int]:
        """Tokens of each choice."""
        return [len(choice.token_ids) for choice in self._choices]

    def emitted(self) -> list[Sequence[int] | None]:
        """The tokens of each choice; None: it has ended. Empty: there are none, and all go on."""
        if not self.num_tokens and not any(choice.end for choice in self._choices):
            return []
        return [tuple(choice.token_ids) if choice.end is None else None for choice in self._choices]

    def go_on(self, delivered: Sequence[tuple[Sequence[int], int]], max_tokens: int) -> list[Delta]:
        """Begins behind what the caller has of each choice: tokens, and characters. Returns that. Raises
        InvalidRequest.
        """
        head: list[Delta] = []
        for index, (choice, (token_ids, characters)) in enumerate(zip(self._choices, delivered, strict=True)):
            pushed = choice.text.push(token_ids)
            if pushed.num_tokens < len(token_ids):
                raise InvalidRequest.of(f"resume.emitted[{index}].token_ids", "go on behind a stop string")
            choice.token_ids += token_ids
            self.num_tokens += len(token_ids)
            text, stop_string = pushed.text, pushed.stop_string
            is_cut = stop_string is None and len(token_ids) >= max_tokens
            if is_cut:
                choice.end = ChoiceEnd(index, common_pb2.FINISH_REASON_LENGTH)
            if is_cut or (stop_string is None and characters > len(text)):  # text is held back until a choice's end
                rest = choice.text.finish()
                text, stop_string = text + rest.text, rest.stop_string
            if stop_string is not None:
                choice.end = ChoiceEnd(index, common_pb2.FINISH_REASON_STOP, stop_string=stop_string)
            choice.late, choice.known = text[characters:], max(0, characters - len(text))
            if token_ids:
                head.append(Delta(index, 0, token_ids, text[:characters]))
        return head

    def late(self) -> list[Frame]:
        """What the caller lacks of choices that had ended before."""
        deltas: list[Frame] = []
        for index, choice in enumerate(self._choices):
            if choice.end is not None and choice.late:
                deltas.append(Frame(delta=Delta(index, len(choice.token_ids), (), choice.late)))
                choice.late = ""
        return deltas

    def take(self, chunk: worker_pb2.TokenChunk) -> Taken:
        """Raises InternalError where tokens are missing, or are of no choice."""
        taken = Taken([], [])
        choices = self._choices
        for tokens in chunk.choices:
            index, first_position = tokens.choice, tokens.first_position
            if index >= len(choices):
                raise InternalError(f"the worker sent tokens of choice {index} of {len(choices)}")
            choice = choices[index]
            if choice.end is not None:
                continue  # its stop string was found; the worker has not heard yet
            if first_position != len(choice.token_ids):
                raise InternalError(
                    f"the worker sent position {first_position} of choice {index}, "
                    f"not {len(choice.token_ids)}: output was lost"
                )
            self._take(choice, index, tokens, taken)
        return taken

    def rest(self) -> list[Frame]:
        """The held back text of choices without an end; called once."""
        deltas: list[Frame] = []
        for index, choice in enumerate(self._choices):
            text = _lacking(choice, choice.text.finish().text) if choice.end is None else ""
            if text:
                deltas.append(Frame(delta=Delta(index, len(choice.token_ids), (), text)))
        return deltas

    def ends(self) -> list[ChoiceEnd]:
        """Without a reason where a choice has not ended by itself."""
        return [choice.end or ChoiceEnd(i) for i, choice in enumerate(self._choices)]

    def _take(self, choice: _Choice, index: int, tokens: worker_pb2.ChoiceTokens, taken: Taken) -> None:
        token_ids: Sequence[int] = tokens.token_ids
        finish_reason = tokens.finish_reason
        is_last = finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
        pushed = choice.text.push(token_ids)
        num_tokens = pushed.num_tokens
        text, stop_string = pushed.text, pushed.stop_string
        if stop_string is None and is_last:
            rest = choice.text.finish()
            text, stop_string = text + rest.text, rest.stop_string
        if stop_string is not None:
            choice.end = ChoiceEnd(index, common_pb2.FINISH_REASON_STOP, stop_string=stop_string)
            if not is_last:
                self._is_cut_short = True
                taken.stopped.append(index)
        elif is_last:
            stop_token_id = tokens.stop_token_id if tokens.HasField("stop_token_id") else None
            stop_string = self._stop_tokens.get(stop_token_id) if stop_token_id is not None else None
            if stop_string is not None:
                stop_token_id = None
            choice.end = ChoiceEnd(index, finish_reason, stop_string=stop_string, stop_token_id=stop_token_id)
        if num_tokens < len(token_ids):
            token_ids = token_ids[:num_tokens]
        if choice.late or choice.known:
            text = _lacking(choice, text)
        if not num_tokens and not text:
            return
        delta = Delta(index, len(choice.token_ids), token_ids, text, tokens.logprobs[:num_tokens])
        choice.token_ids += token_ids
        self.num_tokens += num_tokens
        taken.deltas.append(Frame(delta=delta))


def _lacking(choice: _Choice, text: str) -> str:
    """What the caller has not got of it."""
    told = (choice.late + text)[choice.known :]
    choice.known = max(0, choice.known - len(choice.late + text))
    choice.late = ""
    return told
