"""An answer in blocks of one kind each: texts, reasoning, calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from manylora_router.dialect.pieces import CallArguments, CallBegin, CallEnd, Piece, Reasoning


class Kind(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


@dataclass
class Block:
    kind: Kind
    text: str = ""  # of a call: its arguments
    name: str = ""  # of a call
    source: str = ""  # of a call: the answer's text before the arguments
    is_whole: bool = False  # of a call
    number: int = 0  # of a call: how many there are before it


class Blocks:
    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.all: list[Block] = []
        for piece in pieces:
            self.add(piece)

    def add(self, piece: Piece) -> str:
        """To the last block, or to a new one. Returns what its text has more."""
        if isinstance(piece, CallBegin):
            self.all.append(Block(Kind.CALL, name=piece.name, source=piece.source, number=len(self.of(Kind.CALL))))
            return ""
        if isinstance(piece, CallEnd):
            self.all[-1].is_whole = True
            return ""
        if not isinstance(piece, CallArguments):
            kind = Kind.REASONING if isinstance(piece, Reasoning) else Kind.TEXT
            if not self.all or self.all[-1].kind is not kind:
                self.all.append(Block(kind))
        self.all[-1].text += piece.text
        return piece.text

    def of(self, kind: Kind) -> list[Block]:
        return [block for block in self.all if block.kind is kind]

    @property
    def has_whole_calls(self) -> bool:
        return any(block.is_whole for block in self.all)

    def text_of(self, kind: Kind) -> str:
        return "".join(block.text for block in self.of(kind))

    def settled(self) -> Blocks:
        """Calls that broke, as the text that they were read from."""
        found = Blocks()
        for block in self.all:
            is_broken = block.kind is Kind.CALL and not block.is_whole
            text = block.source + block.text
            last = found.all[-1] if found.all else None
            if not is_broken and block.kind is not Kind.TEXT:
                block.number = len(found.of(Kind.CALL))
                found.all.append(block)
            elif last is not None and last.kind is Kind.TEXT:
                last.text += text
            else:
                found.all.append(Block(Kind.TEXT, text))
        return found
