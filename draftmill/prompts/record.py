"""The canonical record of a prompt, and its id.

Data sets spell the same conversation in many ways; one canonical form makes equal prompts equal bytes, so that the id
is a digest of all that decides the prompt and of nothing else: members that no chat template reads are left out.

    {"messages": [{"role", "content", ...}], "tools": [...]?, "answer": {"role": "assistant", ...}?}
    {"input_ids": [int], "loss_mask": [0 or 1]}                                   (only with answers: keep)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftmill.canonical import canonical_json
from draftmill.errors import UserError
from draftmill.prompts.bad import BadRecord, Kind

ID_BYTES = 16
PROMPT_FIELDS = ("messages", "conversations", "prompt", "instruction")
ANSWER_FIELDS = ("answer", "output", "response", "completion")
TOKEN_FIELDS = ("input_ids", "loss_mask")
COLUMNS = frozenset((*PROMPT_FIELDS, *ANSWER_FIELDS, *TOKEN_FIELDS, "input", "system", "tools"))

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
# Members beside role and content that chat templates read.
_KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rules:
    """How a source's records are to be read: the column with the prompt, what happens to answers, a system turn."""

    field: str | None = None
    answers: Literal["drop", "keep"] = "drop"
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A canonical record, its canonical JSON in UTF-8, and the id as bytes."""

    record: Record
    data: bytes
    id: bytes

    @property
    def text(self) -> str:
        """The canonical JSON."""
        return self.data.decode()

    @property
    def size(self) -> int:
        """The length of the canonical JSON in bytes."""
        return len(self.data)

    @property
    def prompt_id(self) -> str:
        """The id in hex digits."""
        return self.id.hex()


def parse(value: Any, rules: Rules) -> Prompt:
    """Turn a raw record into a prompt. Raises BadRecord with the kind of fault and the reason."""
    return identify(canonical_record(value, rules))


def parse_answered(value: Any, field: str | None = None) -> Prompt:
    """Turn a raw record that holds an answer into a prompt with it. Raises BadRecord, also if there is no answer."""
    return parse(value, Rules(field=field, answers="keep"))


def identify(record: Record) -> Prompt:
    """Give a canonical record its id. Raises BadRecord for what no UTF-8 text can hold, and for NUL bytes."""
    try:
        data = canonical_json(record).encode()
    except UnicodeEncodeError:
        raise BadRecord(Kind.INVALID_UTF8, "a text holds a byte or half a character that is not valid UTF-8") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRecord(Kind.WRONG_TYPE, f"a value is not plain JSON ({error})") from None
    return identify_text(record, data)


def identify_text(record: Record, data: bytes) -> Prompt:
    """Give a canonical record with its canonical JSON its id. Raises BadRecord for NUL bytes."""
    if b"\\u0000" in data and _ESCAPED_NUL.search(data):
        raise BadRecord(Kind.NUL_BYTE, "a text holds a NUL byte")
    return Prompt(record, data, hashlib.sha256(data).digest()[:ID_BYTES])


def prompt_id(record: Record) -> str:
    """The id of a canonical record: the first 32 hex digits of the sha256 of its canonical JSON."""
    return identify(record).prompt_id


def check_columns(path: str, names: Sequence[str], field: str | None) -> None:
    """Raise UserError if a table lacks the column that the prompt is to come from."""
    if field is not None and field not in names:
        raise UserError(f"{path} has no column {field} (it has {', '.join(names)}): correct this source's `field`.")
    if field is None and not any(name in names for name in (*PROMPT_FIELDS, TOKEN_FIELDS[0])):
        raise UserError(
            f"{path} has none of the columns {', '.join(PROMPT_FIELDS)} (it has {', '.join(names)}): "
            "name the prompt's column in this source's `field`."
        )


def canonical_record(value: Any, rules: Rules) -> Record:
    """The canonical form of a raw record. Raises BadRecord."""
    if not isinstance(value, dict):
        raise BadRecord(Kind.WRONG_TYPE, f"the record is {_json_name(value)} instead of an object")
    if rules.field is None and value.get("input_ids") is not None:
        if rules.answers == "keep":
            return _tokens(value)
        if not any(value.get(name) is not None for name in PROMPT_FIELDS):
            raise BadRecord(Kind.NO_PROMPT, "input_ids are taken only with `answers: keep` for this source")
    messages = _messages_of(value, rules)
    answer = _take_answer(value, messages) if rules.answers == "keep" else None
    _check_end(messages)
    record: Record = {"messages": _with_system(messages, value, rules.system)}
    if tools := _tools(value.get("tools")):
        record["tools"] = tools
    if answer is not None:
        record["answer"] = answer
    return record


def _messages_of(value: Record, rules: Rules) -> list[Record]:
    if rules.field is not None:
        if value.get(rules.field) is None:
            raise BadRecord(Kind.NO_PROMPT, f"the record has no `{rules.field}`")
        return _field(value, rules.field)
    for name in PROMPT_FIELDS:
        if value.get(name) is not None:
            return _field(value, name)
    raise BadRecord(Kind.NO_PROMPT, f"the record has none of {', '.join(PROMPT_FIELDS)}")


def _field(value: Record, name: str) -> list[Record]:
    content = value[name]
    if isinstance(content, str):
        if name in ("messages", "conversations"):
            content = _embedded(content, name)
        else:
            return [{"role": "user", "content": _text(content, f"`{name}`") + _alpaca_input(value, name)}]
    if not isinstance(content, list):
        raise BadRecord(Kind.WRONG_TYPE, f"`{name}` is {_json_name(content)} instead of a list of turns")
    if not content:
        raise BadRecord(Kind.EMPTY_TURN, f"`{name}` holds no turn")
    return [_turn(number, turn) for number, turn in enumerate(content, start=1)]


def _alpaca_input(value: Record, name: str) -> str:
    extra = value.get("input") if name == "instruction" else None
    if extra is None or extra == "":
        return ""
    if not isinstance(extra, str):
        raise BadRecord(Kind.WRONG_TYPE, f"`input` is {_json_name(extra)} instead of a string")
    return "" if extra.isspace() else f"\n\n{extra}"


def _embedded(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRecord(Kind.BROKEN_JSON, f"`{name}` is a text that is not JSON") from None


def _turn(number: int, turn: Any) -> Record:
    if not isinstance(turn, dict):
        raise BadRecord(Kind.WRONG_TYPE, f"turn {number} is {_json_name(turn)} instead of an object")
    named = turn.get("role", turn.get("from"))
    if not isinstance(named, str):
        raise BadRecord(Kind.WRONG_TYPE, f"the role of turn {number} is {_json_name(named)} instead of a string")
    role = _ROLES.get(named) or _ROLES.get(named.lower())
    if role is None:
        raise BadRecord(Kind.UNKNOWN_ROLE, f"turn {number} has the unknown role {named[:40]!r}")
    message: Record = {"role": role}
    for name in _KEPT:
        if turn.get(name) is not None:
            message[name] = turn[name]
    content = turn.get("content", turn.get("value"))
    # A call of a tool may stand without words, and a tool may answer nothing.
    if role == "tool" or "tool_calls" in message:
        message["content"] = _joined(content if content is not None else "", f"turn {number}")
    else:
        message["content"] = _text(content, f"turn {number}")
    return message


def _text(content: Any, what: str) -> str:
    text = _joined(content, what)
    if not text or text.isspace():
        raise BadRecord(Kind.EMPTY_TURN, f"{what} is empty")
    return text


def _joined(content: Any, what: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part, what) for part in content)
    raise BadRecord(Kind.WRONG_TYPE, f"the content of {what} is {_json_name(content)} instead of a string")


def _part(part: Any, what: str) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return str(part["text"])
    raise BadRecord(Kind.WRONG_TYPE, f"the content of {what} has a part that is not text")


def _take_answer(value: Record, messages: list[Record]) -> Record:
    if messages[-1]["role"] == "assistant":
        return messages.pop()
    for name in ANSWER_FIELDS:
        answer = value.get(name)
        if isinstance(answer, str) and answer:
            return {"role": "assistant", "content": _text(answer, f"`{name}`")}
        if isinstance(answer, list) and len(answer) == 1:
            message = _turn(1, answer[0])
            if message["role"] == "assistant":
                return message
    raise BadRecord(Kind.NO_ANSWER, "there is no answer: end with an assistant turn or set `answers: drop`")


def _check_end(messages: list[Record]) -> None:
    last = messages[-1]["role"] if messages else "system"
    if last == "assistant":
        raise BadRecord(
            Kind.ASSISTANT_LAST,
            "the last turn is the assistant's: set `answers: keep` for this source or drop the turn",
        )
    if last == "system":
        raise BadRecord(Kind.SYSTEM_LAST, "no user turn stands at the end")


def _with_system(messages: list[Record], value: Record, default: str | None) -> list[Record]:
    if any(message["role"] == "system" for message in messages):
        return messages
    system = value.get("system") or default
    if not system:
        return messages
    return [{"role": "system", "content": _text(system, "`system`")}, *messages]


def _tools(tools: Any) -> list[Record]:
    if isinstance(tools, str) and tools.strip():
        tools = _embedded(tools, "tools")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord(Kind.WRONG_TYPE, f"`tools` is {_json_name(tools)} that is not a list of objects")
    return tools


def _tokens(value: Record) -> Record:
    ids, mask = value["input_ids"], value.get("loss_mask")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise BadRecord(Kind.WRONG_TYPE, "`input_ids` is not a list of token ids")
    if not isinstance(mask, list) or not _all_bits(mask):
        raise BadRecord(Kind.WRONG_TYPE, "`loss_mask` is not a list of 0 and 1")
    if len(ids) != len(mask):
        raise BadRecord(Kind.WRONG_TYPE, f"`input_ids` has {len(ids)} entries and `loss_mask` has {len(mask)}")
    if not ids:
        raise BadRecord(Kind.EMPTY_TURN, "`input_ids` is empty")
    return {"input_ids": ids, "loss_mask": [int(bit) for bit in mask]}


def _all_bits(mask: Iterable[Any]) -> bool:
    return all(isinstance(bit, int | float) and bit in (0, 1) for bit in mask)


def _json_name(value: Any) -> str:
    return _JSON_NAMES.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
