"""Write a page that trains a classifier of handwritten digits in the browser.

    make page
    python -m http.server -d build/page

Any static web server can serve the folder.
"""

from __future__ import annotations

from pathlib import Path

from demo import classifier
from sklearn.datasets import load_digits

import onward

OUT = Path(__file__).resolve().parent.parent / "build" / "page"


def main() -> None:
    digits = load_digits()
    data = {"image": (digits.data / 16).astype("float32"), "labels": digits.target}
    page = onward.page(
        classifier(),
        data,
        loss="cross_entropy",
        optimizer="adam:lr=3e-3",
        validation=0.1,
        title="Handwritten digits",
        output=OUT,
    )
    folder = page.path.relative_to(Path.cwd()) if page.path.is_relative_to(Path.cwd()) else page.path
    print(f"wrote {folder}: a browser loads {page.loaded / 1e6:.1f} MB")
    print(f"to open it: python -m http.server -d {folder}, then http://localhost:8000")


if __name__ == "__main__":
    main()
