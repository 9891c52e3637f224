"""Several files that are written together: all of them, or everything stays as it was."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from onward.errors import WriteError
from onward.model.storage.transaction import replacing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an older version of two files, and one that is nobody's business."""
    made = tmp_path / "run"
    made.mkdir()
    for name in ("a", "b", "mine"):
        (made / name).write_text("old")
    return made


def write(folder: Path) -> None:
    with replacing(folder) as staging:
        (staging / "a").write_text("new")
        (staging / "b").write_text("new")
        (staging / "c").mkdir()
        (staging / "c" / "d").write_text("new")


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


OLD = {"a": "old", "b": "old", "mine": "old"}
NEW = {"a": "new", "b": "new", "c/d": "new", "mine": "old"}


def test_all_is_there_at_once(folder: Path, tmp_path: Path) -> None:
    (folder / "a").chmod(0o600)
    write(folder)
    assert content(folder) == NEW and (folder / "a").stat().st_mode & 0o777 == 0o600
    write(tmp_path / "new" / "deep")
    assert content(tmp_path / "new" / "deep") == {name: text for name, text in NEW.items() if name != "mine"}
    write(folder)  # also over folders
    assert content(folder) == NEW
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run"]


def failing(call: Callable[..., None], at: int, error: BaseException) -> Callable[..., None]:
    count = iter(range(10_000))

    def fails(*arguments: object) -> None:
        if next(count) == at:
            raise error
        call(*arguments)

    return fails


ERRORS = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    OSError(errno.EACCES, os.strerror(errno.EACCES)),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_whatever_fails_leaves_what_was_there(
    folder: Path, tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(5):  # two that move old files away, three that put new ones there
        with monkeypatch.context() as patched, pytest.raises((WriteError, KeyboardInterrupt)) as raised:
            patched.setattr(os, "replace", failing(os.replace, at, error))
            write(folder)
        assert content(folder) == OLD and [path.name for path in tmp_path.iterdir()] == ["run"]
        if isinstance(raised.value, WriteError):
            assert f"could not write `{folder}`" in str(raised.value) and raised.value.hint
    with pytest.raises(WriteError, match="No space left"), replacing(folder) as staging:
        (staging / "a").write_text("new")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert content(folder) == OLD


def test_what_is_no_folder_and_what_is_read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WriteError, match="not a folder"):
        write(folder / "a")
    with pytest.raises(WriteError, match="could not write `/proc/nothing/run`"):
        write(Path("/proc/nothing/run"))
    (folder / "b").unlink()
    (folder / "b").mkdir()
    (folder / "b" / "mine").write_text("old")
    with pytest.raises(WriteError, match="b`: it is a folder"):
        write(folder)
    assert content(folder) == {"a": "old", "b/mine": "old", "mine": "old"}
    (folder / "b" / "mine").unlink()
    (folder / "b").rmdir()
    (folder / "b").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "b")
    with pytest.raises(WriteError, match="b`: it is read-only"):
        write(folder)
    assert content(folder) == OLD
