"""`python -m campaign KIND FIRST COUNT`: cases of a kind. One that ends badly is a line, [number, what is wrong]."""

from __future__ import annotations

import json
import sys

from campaign.kinds import damaged_case, good_case, kinds, made


def main(name: str, first: int = 0, count: int = 100) -> int:
    kind, failures = kinds()[name], 0
    with made(kind) as good:
        cases = [(str(use), good_case(good, use)) for use in kind.uses]
        for number in range(first, first + count):
            cases.append((number, damaged_case(kind, good, number)))
        for number, wrong in cases:
            if wrong is not None:
                failures += 1
                print(json.dumps([number, wrong]), flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
