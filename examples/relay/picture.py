"""Plot of losses over steps, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 360, 50, 40
COLORS = {"PyTorch": "#de3412", "Keras": "#f28e00", "JAX": "#1a73b7", "ONNX Runtime": "#9a9a9a"}

Curves = Mapping[str, tuple[int, Sequence[float]]]
"""Name -> the first step, and the losses from there on."""


def draw(curves: Curves, file: Path) -> None:
    """Write the whole run as a wide gray line, with the legs of the relay on top."""
    end = max(start + len(losses) for start, losses in curves.values())
    values = [loss for _, losses in curves.values() for loss in losses]
    low, high = math.log(min(values)), math.log(max(values))

    def point(step: int, loss: float) -> str:
        x = LEFT + step / (end - 1) * (WIDTH - LEFT - 20)
        y = HEIGHT - BOTTOM - (math.log(loss) - low) / (high - low) * (HEIGHT - BOTTOM - 20)
        return f"{x:.1f},{y:.1f}"

    lines, words = [], []
    ordered = sorted(curves.items(), key=lambda item: -len(item[1][1]))
    for name, (start, losses) in ordered:
        points = " ".join(point(start + i, loss) for i, loss in enumerate(losses))
        whole = len(losses) == end
        style = f'stroke="{COLORS[name]}" stroke-width="{7 if whole else 2}" stroke-opacity="{0.5 if whole else 1}"'
        lines.append(f'<polyline fill="none" {style} points="{points}"/>')
    for i, (name, (start, losses)) in enumerate(curves.items()):
        text = f"{name}, steps {start} to {start + len(losses)}"
        words.append(f'<text x="{WIDTH - 260}" y="{40 + 20 * i}" fill="{COLORS[name]}">{text}</text>')
    ticks = [
        f'<text x="{LEFT - 8}" y="{point(0, loss).split(",")[1]}" text-anchor="end">{loss:.2g}</text>'
        for loss in (min(values), math.sqrt(min(values) * max(values)), max(values))
    ]
    axis = f'<text x="{LEFT}" y="{HEIGHT - 12}">loss by step: one run, handed on as an ONNX file</text>'
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="13">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(lines + words + ticks)}{axis}</svg>\n'
    )
