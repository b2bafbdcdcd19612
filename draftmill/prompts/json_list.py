"""Raw records of a JSON document: a list, or an object with one list of records, read in pieces.

The standard parser wants the whole document; here it parses one record at a time from a moving piece of text, so that
memory is that of a few records. A broken document cannot be read on behind the fault, so the fault is the file's.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import IO, Any

from draftmill.errors import UserError
from draftmill.prompts.record import PROMPT_FIELDS

_CHUNK = 1 << 20
_LONGEST_FIRST_LINE = 16 << 20
_BLANK = " \t\r\n"
# A piece that ends inside a word, a number or an escape is refused this close to its end.
_NEAR_END = 16


def looks_like_lines(stream: IO[bytes], field: str | None) -> bool:
    """Whether a .json file is JSONL by its first line: a whole object that is not the only content, or is a record."""
    line = stream.readline(_LONGEST_FIRST_LINE)
    rest = stream.read(1)
    stream.seek(0)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(rest or field in value or any(name in value for name in PROMPT_FIELDS))


def records_of_json(path: str, stream: IO[bytes]) -> Iterator[Any]:
    """Each record of the document's list. Raises UserError if it is broken or holds no list, or more than one."""
    # Bytes that are no UTF-8 become lone surrogates here and are refused record by record when encoded again.
    with io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="") as reader:
        yield from _elements_of_document(path, _Text(path, reader))


def _elements_of_document(path: str, text: _Text) -> Iterator[Any]:
    opening = text.peek()
    if opening == "[":
        yield from _elements(text)
    elif opening == "{":
        yield from _elements_of_object(path, text)
    else:
        raise text.broken("it is neither a list nor an object")
    if text.peek():
        raise text.broken("more text follows the document")


def _elements(text: _Text) -> Iterator[Any]:
    text.take("[")
    if text.peek() == "]":
        text.take("]")
        return
    while True:
        yield text.value()
        if text.peek() == "]":
            text.take("]")
            return
        text.take(",")


def _elements_of_object(path: str, text: _Text) -> Iterator[Any]:
    text.take("{")
    lists = 0
    while text.peek() != "}":
        key = text.value()
        text.take(":")
        if text.peek() == "[" and text.second() == "{":
            lists += 1
            if lists > 1:
                raise UserError(f"{path} holds more than one list of records: keep only one of them (here `{key}`).")
            yield from _elements(text)
        else:
            text.value()
        if text.peek() != "}":
            text.take(",")
    text.take("}")
    if not lists:
        raise UserError(f"{path} holds no list of records: give a list, an object with one, or JSONL.")


class _Text:
    """A moving piece of the document."""

    def __init__(self, path: str, reader: io.TextIOWrapper) -> None:
        self._path = path
        self._reader = reader
        self._text, self._at, self._lines = "", 0, 1
        self._decoder = json.JSONDecoder()

    def _more(self) -> bool:
        """Drop what was used, read on by at least as much as is held; False at the end of the document."""
        self._lines += self._text.count("\n", 0, self._at)
        self._text, self._at = self._text[self._at :], 0
        piece = self._reader.read(max(_CHUNK, len(self._text)))
        self._text += piece
        return bool(piece)

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _BLANK:
                    return self._text[self._at]
                self._at += 1
            if not self._more():
                return ""

    def second(self) -> str:
        """The next but one character that is not blank; empty at the end."""
        at = self._at
        while not (rest := self._text[at + 1 :].lstrip(_BLANK)):
            if not self._more():
                return ""
            at = self._at
        return rest[0]

    def take(self, sign: str) -> None:
        """Step over one expected sign."""
        found = self.peek()
        if found != sign:
            raise self.broken(f"'{sign}' is expected" if found else "it ends too early")
        self._at += 1

    def value(self) -> Any:
        """Parse the next value."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._incomplete(error) and self._more():
                    continue
                ended = error.msg.startswith("Unterminated") or error.pos >= len(self._text.rstrip(_BLANK))
                raise self.broken("it ends too early" if ended else error.msg, error.pos) from None
            except ValueError as error:
                raise self.broken(str(error)) from None
            except RecursionError:
                raise self.broken("it is nested too deeply") from None
            if end == len(self._text) and self._more():  # a number may go on in the next piece
                continue
            self._at = end
            return value

    def _incomplete(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _NEAR_END

    def broken(self, reason: str, at: int | None = None) -> UserError:
        """The error for a fault at this place."""
        line = self._lines + self._text.count("\n", 0, self._at if at is None else at)
        return UserError(f"{self._path} line {line}: broken JSON ({reason}); correct it or copy the file again.")
