"""Models of frameworks and libraries, on every route: exact, or refused with a hint."""

import pytest

from zoo import EXACT, RAW, WRONG, Case, cases, recorded, tried

ROWS = cases()


def _parameter(case: Case):
    missing = [pytest.mark.skip(reason=f"needs {case.missing[0]}: make test-all installs it")] if case.missing else []
    return pytest.param(case, marks=[*missing, *(() if case.quick else (pytest.mark.slow,))], id=str(case))


@pytest.mark.parametrize("case", [_parameter(case) for case in ROWS])
def test_every_route_is_exact_or_refused(case):
    """Nothing is wrong, no error is raw, and what the record has as exact is so."""
    outcomes, before = tried(case), recorded().get(str(case), {})
    failed = {route: reason for route, (way, reason) in outcomes.items() if way in (WRONG, RAW)}
    lost = {route: outcomes.get(route) for route, (way, _) in before.items() if way == EXACT}
    assert not failed, failed
    assert all(outcome is not None and outcome[0] == EXACT for outcome in lost.values()), lost


def test_rows_are_named_once_and_records_are_of_rows():
    names = [str(case) for case in ROWS]
    assert len(names) == len(set(names))
    assert set(recorded()) <= set(names)
