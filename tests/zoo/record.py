"""Try rows and record what comes of them: `python tests/zoo/record.py [PART OF A NAME ...]`.

With `--missing`, only rows that were not tried on all routes. docs/tables.py writes the table of
docs/frameworks/models.md.
"""

from __future__ import annotations

import os
import sys
import time

os.environ |= {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
}
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

from zoo import EXACT, ROUTES, cases, record, recorded, tried


def main() -> None:
    parts = [part for part in sys.argv[1:] if not part.startswith("--")]
    done = [key for key, tries in recorded().items() if "capture" in tries or not ROUTES.keys() - tries.keys()]
    done = done if "--missing" in sys.argv else []
    chosen = [case for case in cases() if not case.missing and str(case) not in done]
    for case in chosen:
        if parts and not any(part in str(case) for part in parts):
            continue
        begun = time.time()
        outcomes = tried(case)
        failed = {route: f"{way}: {reason}" for route, (way, reason) in outcomes.items() if way != EXACT}
        print(f"{time.time() - begun:6.1f} s  {case}  {failed or EXACT}", flush=True)
        record({str(case): outcomes})


if __name__ == "__main__":
    main()
