"""`report`: a run as one HTML page to look at and to send to a colleague.

history.py reads the log; headline.py and charts.py make words and pictures of it; document.py writes them
down, with the style and the scripts in page/.
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
    """Write the report of a run as a page of HTML, and return its path.

        onward.report("runs/digits")    # runs/digits/report.html

    The run may still be going on, or have been killed; files that are missing or damaged are told on the page.

    - `run`: the folder of the run
    - `output`: the page, or a folder for it; `report.html` in the folder of the run unless given
    - `force`: overwrite a file that is no report; files of the run never are
    """
    from onward.training.log import read_log
    from onward.training.report.document import document
    from onward.training.report.history import History, summary_of

    folder = Path(run)
    log = folder / "log.jsonl"
    if not log.is_file():
        raise DataError(f"`{folder}` holds no run: there is no log.jsonl", hint="name the folder that a run wrote")
    path = folder if output is None else Path(output)
    path = path / "report.html" if path.is_dir() else path
    _refuse_to_replace(path, folder, force)
    history = History().read(read_log(log))
    config, complaint = _config(folder / "config.yaml")
    summary, missing = summary_of(folder)
    page = document(history, config, summary, [remark for remark in (complaint, missing) if remark])
    write_file(path, page)
    return path


def _config(path: Path) -> tuple[dict[str, Any], str | None]:
    try:
        return (read_configuration(path), None) if path.exists() else ({}, None)
    except DataError as error:
        return {}, error.message


def _refuse_to_replace(path: Path, folder: Path, force: bool) -> None:
    if not path.exists() or (mentions(path, "<!DOCTYPE html>") and mentions(path, "<code>onward report</code>")):
        return
    if path.resolve().parent == folder.resolve():
        raise WriteError(f"`{path}` is not a page, but belongs to the run", hint="name another file")
    if not force:
        raise WriteError(f"`{path}` exists, and is not such a page", hint="name another file, or use `--force`")
