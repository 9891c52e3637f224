"""Report of a run as one HTML page.

history.py reads the log; charts.py and document.py make the page, with the style and scripts in page/.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onward.arguments import checked
from onward.configuration import read_configuration
from onward.errors import DataError, WriteError
from onward.model.storage import write_file
from onward.model.storage.files import mentions

__all__ = ["report"]

PathLike = str | os.PathLike[str]


@checked()
def report(run: PathLike, output: PathLike | None = None, *, force: bool = False) -> Path:
    """Write an HTML report of a run, and return its path.

        onward.report("runs/digits")    # runs/digits/report.html

    The run may still be training, or have been killed. The report names missing and damaged files.

    - `run`: the folder of the run
    - `output`: the HTML file, or a folder for it (default: `report.html` in the folder of the run)
    - `force`: overwrite a file that is not a report; files of the run are never overwritten
    """
    from onward.training.log import read_log
    from onward.training.report.document import document
    from onward.training.report.history import History, summary_of

    folder = Path(run)
    log = folder / "log.jsonl"
    if not log.is_file():
        raise DataError(
            f"`{folder}` holds no run: log.jsonl is missing", hint="pass the folder of a run: `onward report runs/NAME`"
        )
    path = folder if output is None else Path(output)
    path = path / "report.html" if path.is_dir() else path
    _refuse_to_replace(path, folder, force)
    history = History().read(read_log(log))
    config: dict[str, Any] = {}
    remarks = []
    try:
        config = read_configuration(folder / "config.yaml") if (folder / "config.yaml").exists() else {}
    except DataError as error:
        remarks.append(error.message)
    summary, remark = summary_of(folder)
    write_file(path, document(history, config, summary, [*remarks, remark] if remark else remarks))
    return path


def _refuse_to_replace(path: Path, folder: Path, force: bool) -> None:
    if not path.exists() or (mentions(path, "<!DOCTYPE html>") and mentions(path, "<code>onward report</code>")):
        return
    if path.resolve().parent == folder.resolve():
        raise WriteError(f"`{path}` is a file of the run, not a report", hint="write another file: `-o report.html`")
    if not force:
        raise WriteError(f"`{path}` exists and is not a report", hint="write another file, or use `--force`")
