"""The second sensor: nvidia-smi, a program with its own way to the driver.

Its output has broken many a script: cut off, mixed with warnings, empty. So a reading counts only when every row
parses, the last line is ended, and the rows are exactly the GPUs that were asked for. Only those are asked for, since
one lost GPU makes nvidia-smi fail for the whole host.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from draftmill.gpu.child import Answer, Running
from draftmill.gpu.record import SecondSensorRecord

_QUERY = "uuid,memory.used,memory.total"
_ROW = re.compile(r"(GPU-[0-9A-Za-z-]+), (\d+), (\d+)")


@dataclass(frozen=True)
class Row:
    """nvidia-smi's view of one GPU, in MiB."""

    used_mib: int
    total_mib: int


@dataclass(frozen=True)
class Second:
    """How nvidia-smi answered, and its rows by UUID (empty unless the status is "ok")."""

    record: SecondSensorRecord
    rows: dict[str, Row]


class PendingSecond:
    """A reading of the given GPUs under way; off, or of no GPU: none at all."""

    def __init__(self, uuids: Sequence[str], timeout_s: float, off: bool = False) -> None:
        self._uuids = frozenset(uuids)
        argv = ["nvidia-smi", f"--id={','.join(uuids)}", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        self._running = None if off or not uuids else Running(argv, timeout_s)

    def result(self) -> Second:
        """The reading, once."""
        if self._running is None:
            return Second(SecondSensorRecord(status="off"), {})
        try:
            return read_answer(self._running.answer(), self._uuids)
        finally:
            self._running.close()


def read_answer(answer: Answer, uuids: frozenset[str]) -> Second:
    """nvidia-smi's answer about `uuids` as a reading."""
    elapsed = round(answer.elapsed_s, 3)
    if answer.status == "missing":
        return Second(SecondSensorRecord(status="missing"), {})
    if answer.status == "hung":
        return Second(SecondSensorRecord(status="hung", elapsed_s=elapsed), {})
    if answer.status == "exited" and answer.exit_code != 0:
        return Second(SecondSensorRecord(status="failed", exit_code=answer.exit_code, elapsed_s=elapsed), {})
    rows = parse(answer.out, uuids) if answer.status == "exited" else None
    if rows is None:
        return Second(SecondSensorRecord(status="garbled", exit_code=answer.exit_code, elapsed_s=elapsed), {})
    used = {uuid: row.used_mib for uuid, row in rows.items()}
    return Second(SecondSensorRecord(status="ok", exit_code=0, complete=True, used_mib=used, elapsed_s=elapsed), rows)


def parse(text: str, uuids: frozenset[str]) -> dict[str, Row] | None:
    """Rows by UUID, or None when the text is not exactly one row for each of `uuids`."""
    if not text.endswith("\n"):
        return None
    matches = [_ROW.fullmatch(line.strip()) for line in text.splitlines()]
    rows = {m[1]: Row(int(m[2]), int(m[3])) for m in matches if m}
    whole = None not in matches and len(rows) == len(matches) and rows.keys() == uuids
    return rows if whole else None
