"""`onward page`: a page that trains a model in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from onward.cli import options
from onward.cli.app import BUILD, command
from onward.cli.console import print_json, remark
from onward.cli.files import working
from onward.cli.options import option, options_from, select_given, source_of
from onward.options import PageOptions


@command(
    BUILD,
    "onward page digits.onnx --data digits.npz --loss cross_entropy --validation 0.1 -o site/",
    "onward page training.onnx --data digits.npz --title 'Handwritten digits' -o site/",
    "onward page net.onnx --loss cross_entropy --new-head 3 --class cat --class dog --class bird -o site/",
    "onward page net.onnx --data table.csv --loss mse --picture none --runtime node_modules/onnxruntime-web -o site/",
    usage="MODEL [--data DATA] -o FOLDER [OPTIONS]",
    **options_from(PageOptions),
)
def page(
    model: options.Model,
    *,
    output: Annotated[Path, option("--output -o", "FOLDER", "Where the page goes.")],
    force: Annotated[bool, option("--force", None, "Write into a folder that holds something else.")] = False,
    as_json: options.Json = False,
    **given: Any,
) -> None:
    """Write a page that trains a model in the browser: train, watch, stop, go on, try it, download it.

    The model is a training model, or any model and a loss. The folder is for any web server, and asks no other: whoever
    opens it trains on their own device, on the data that are given here, on what they draw, drop and film, or on both.
    """
    import onward
    from onward.inspect.formatting import size

    asked = select_given(PageOptions, given)
    if "data" in asked:
        asked["data"] = source_of(given["data"])
    with working(f"writing a page for {model}", model):
        made = onward.page(model, **asked, output=output, force=force)
    if as_json:
        print_json({"output": str(made.path), "sizes": made.sizes, "notes": list(made.notes)})
        return
    for note in made.notes:
        remark(note)
    remark(f"wrote {made.path}: a browser loads {size(made.loaded)}, {size(made.sizes['runtime'])} of it ONNX Runtime")
    remark(f"to look at it: python -m http.server -d {made.path}, and open http://localhost:8000")
