"""`python -m campaign KIND FIRST COUNT`: cases of a kind. One that ends badly is a line, [number, what is wrong]."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from campaign.kinds import Kind, damaged_case, good_case, kinds, made


def cases(kind: Kind, first: int, count: int) -> Iterator[tuple[object, str | None]]:
    with made(kind) as good:
        for use in kind.uses:
            yield str(use), good_case(good, use)
        for number in range(first, first + count):
            yield number, damaged_case(kind, good, number)


def main(name: str, first: int = 0, count: int = 100) -> int:
    failed = False
    for case, wrong in cases(kinds()[name], first, count):
        if wrong is not None:
            failed = True
            print(json.dumps([case, wrong]), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
