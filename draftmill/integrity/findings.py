"""What a look through a store finds, typed: a person reads the sentence, a program the four fields.

Damage is what makes an object of no use and what quarantine moves. A note is worth a line and harms nothing: a record
that is missing, a file that is not ours, work that a kill has left behind.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Damage = Literal[
    "empty",  # no bytes at all
    "size",  # another number of bytes than recorded
    "digest",  # other bytes than recorded
    "unreadable",  # no whole file of its format
    "schema",  # other columns or tensors
    "provenance",  # nothing inside says what made it
    "name",  # the name says other than the inside
    "fingerprint",  # the fingerprint is not that of the spec inside
    "rows",  # rows are lost, doubled, or of other prompts
    "offsets",  # rows of hidden states do not lie where they should
    "shape",  # tensors do not fit together
    "tokens",  # hidden states of other tokens than the completions'
    "values",  # numbers that are not finite
    "content",  # a JSON object that does not say what its kind must
    "contract",  # a drafter that engines would not load as it was trained
    "consumer",  # made from bytes that are known to be damaged
]
Note = Literal[
    "record missing",  # no record to hold the bytes against
    "record unreadable",
    "record of another",  # the store's own digest fits and the record's does not: two builds made the object
    "remade input",  # an input was made again since, with other bytes that are sound: what was made before stands
    "input unproven",  # an input is damaged, and no record says whether before it was read
    "incomplete",  # some outputs of the job are there and some are not
    "orphaned journal",
    "orphaned claim",
    "foreign",  # nothing of ours
]
DAMAGE: frozenset[str] = frozenset(get_args(Damage))


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with one key: what, what was expected and what was found."""

    key: str
    what: Damage | Note
    expected: str
    found: str

    @property
    def damage(self) -> bool:
        """Whether the object is of no use."""
        return self.what in DAMAGE

    def __str__(self) -> str:
        return f"{self.key}: {self.what}: expected {self.expected}, found {self.found}"

    def to_json(self) -> dict[str, Any]:
        """The finding as a JSON value."""
        return {**asdict(self), "damage": self.damage}


class Unsound(Exception):
    """An object that is damaged: raised by the checks, caught where the finding is kept."""

    def __init__(self, what: Damage, expected: str, found: str) -> None:
        super().__init__(f"{what}: expected {expected}, found {found}")
        self.what: Damage = what
        self.expected, self.found = expected, found

    def about(self, key: str) -> Finding:
        """The finding."""
        return Finding(key, self.what, self.expected, self.found)


def require(holds: bool, what: Damage, expected: object, found: object) -> None:
    """Raise Unsound unless something holds."""
    if not holds:
        raise Unsound(what, str(expected), str(found))
