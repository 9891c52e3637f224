"""What the checker says: a `Finding` has a stable code, a place, a sentence, the text behind it, and a way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from onward.checker.codes import CODES, Severity

_RANK = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """What `onward.check` has found: an error, a warning or a note."""

    code: str
    """Its row in the table of checks, such as `OW201`."""
    severity: Severity
    place: str
    """Where, in the words of the file: `training_info[0].algorithm/node[3] Gradient "grad"`."""
    message: str
    rule: str
    """The text that demands it: `IR.md, training`, `onnx.proto comment`, `Gradient operator`, `Onward` ..."""
    hint: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return {**asdict(self), "severity": str(self.severity)}

    def __str__(self) -> str:
        return f"{self.severity} {self.code} at {self.place}: {self.message}"


def make_finding(code: str, place: str, message: str, hint: str | None = None) -> Finding:
    """A finding with the severity and the rule that the table of codes gives it."""
    entry = CODES[code]
    return Finding(code, entry.severity, place, message, entry.rule, hint)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, then warnings, then remarks; in the order in which they were found otherwise, each once."""
    return sorted(dict.fromkeys(findings), key=lambda finding: _RANK[finding.severity])


def bare(name: str, most: int = 80) -> str:
    """A name to show: bounded, and without characters that would disturb a terminal."""
    name = name if name.isprintable() else name.encode("unicode_escape").decode("ascii")
    return name if len(name) <= most else f"{name[: most - 1]}…"


def quote(name: str, most: int = 80) -> str:
    return f"`{bare(name, most)}`"


def listing(names: Iterable[str], most: int = 4) -> str:
    """Some names for a sentence: the first few, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(quote, names[:most])) + more
