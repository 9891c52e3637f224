"""What runs of scripts of all frameworks have in common: what they lack, and how an outcome is found."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "zoo"))

from zoo import EXACT, Run, compare_routes


class Skipped(BaseException):
    """The script needs what cannot be had here."""


class Reached(BaseException):
    """The first step of the training of the script."""


def replace_plots() -> None:
    names = ("matplotlib", "seaborn", "IPython", "PIL", "cv2", "imageio", "pydot", "graphviz", "plotly")
    for name in names:
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = mock.MagicMock()
            for inner in ("pyplot", "display", "image", "cm", "colors", "gridspec", "mpl_toolkits", "express"):
                sys.modules[f"{name}.{inner}"] = mock.MagicMock()


def tried(make: Callable[[], Run], routes: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of a run on all routes. `options` are those of its capture, which may ask for another."""
    begun = time.time()

    def run() -> Run:
        try:
            return make()
        except Exception:
            traceback.print_exc()
            raise

    outcomes = compare_routes(run, routes)
    if "`approx=True`" in outcomes.get("capture", ("", ""))[1]:
        options["approx"] = True
        outcomes = compare_routes(run, routes)
    bad = {route: ": ".join(outcome) for route, outcome in outcomes.items() if outcome[0] != EXACT}
    kind = "exact" if not bad else next(iter(outcomes[route][0] for route in bad))
    return {"outcome": kind, "reason": bad, "seconds": round(time.time() - begun, 1), **options}


def outcome_of(script: Path, arguments: Sequence[str], what: str, reached: Callable[..., dict[str, Any]]) -> Any:
    """Run a script up to the first step, which is `what`; return what `reached` returns of it."""
    begun = time.time()
    try:
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
    except Reached as end:
        print(f"{what} after {time.time() - begun:.0f} s", file=sys.stderr)
        return reached(*end.args)
    except Skipped as reason:
        return {"outcome": "skipped", "reason": str(reason)}
    except ImportError as error:
        return {"outcome": "skipped", "reason": f"imports {error.name}"}
    except BaseException as error:
        traceback.print_exc()
        return {"outcome": "skipped", "reason": f"fails before: {type(error).__name__}: {str(error)[:200]}"}
    return {"outcome": "skipped", "reason": f"calls no {what}"}


def finish(result: dict[str, Any]) -> None:
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # threads of data pipelines go on
