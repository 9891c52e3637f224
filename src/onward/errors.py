"""Errors that Onward raises: each has a message with the fact, and a hint with what to do."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence

_PACKAGE = os.path.dirname(__file__) + os.sep


class Error(Exception):
    """Base class of errors that a user can cause: `message` is the fact, `hint` what to do.

    `str(error)` has the hint on its own line. Unprintable characters are escaped: both quote files.
    """

    def __init__(self, message: str, *, hint: str | None = None):
        self.message = safe(message)
        self.hint = safe(hint) if hint is not None else None
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class InvalidModelError(Error, ValueError):
    """The bytes are not an ONNX model, or the model breaks a rule that its reader needs."""


class ExternalDataError(Error, OSError):
    """External data is missing, too short, overlapping, or outside the model's folder."""


class WriteError(Error, OSError):
    """A file could not be written. The previous file is intact."""


class RecipeError(Error, ValueError):
    """A recipe is invalid or does not fit the model."""


class DataError(Error, ValueError):
    """Training data are missing, damaged, changed while read, or do not fit the model."""


class TrainingError(Error, ArithmeticError):
    """A run cannot continue, for example because its loss is not finite."""


class OutOfMemoryError(Error, MemoryError):
    """Not enough device memory for a step, or not enough memory to read or import."""


class MismatchError(Error, ArithmeticError):
    """The two sides of a conversion compute different numbers."""


class ArgumentError(Error, TypeError):
    """An argument of a function is unknown, missing, or of the wrong type."""


class UnknownNameError(Error, KeyError):
    """A name or pattern matches nothing."""


class UnsupportedError(Error, NotImplementedError):
    """Valid, but not supported by Onward."""


@contextlib.contextmanager
def default_hint(hint: str) -> Iterator[None]:
    """Add a hint to errors raised inside that have none."""
    try:
        yield
    except Error as error:
        error.hint = error.hint or safe(hint)
        raise


def warn(message: str) -> None:
    """Warn about a legal but probably unintended call, at the line that called Onward."""
    stack = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1))]
    ours = [depth for depth, file in enumerate(stack, 2) if file.startswith(_PACKAGE)]
    warnings.warn(message, stacklevel=max(ours, default=1) + 1)


MEMORY_HINT = "close other programs, or raise the limit (`ulimit -v`, or that of the container)"


def lacks_memory(error: BaseException) -> bool:
    """True if the error means that memory ran out."""
    message = re.compile("cannot allocate memory|failed to map segment", re.IGNORECASE)
    return isinstance(error, MemoryError) or message.search(str(error)) is not None


@contextlib.contextmanager
def needing_memory(purpose: str) -> Iterator[None]:
    """Raise OutOfMemoryError for `purpose` if memory runs out inside.

    The loader of shared libraries raises ImportError for that.
    """
    try:
        yield
    except (MemoryError, OSError, ImportError) as error:
        if isinstance(error, Error) or not lacks_memory(error):
            raise
        raise OutOfMemoryError(f"not enough memory to {purpose}", hint=MEMORY_HINT) from error


def safe(text: str) -> str:
    """Return text with unprintable characters escaped, such as those that move a cursor."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def message_of(error: BaseException) -> str:
    """Return the message of an error without its hint."""
    return error.message if isinstance(error, Error) else str(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if empty."""
    return message_of(error).strip().partition("\n")[0] or type(error).__name__


def list_names(names: Sequence[str], most: int) -> str:
    """Return the first names for a sentence, and the number of others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + more


def alternatives(words: Sequence[str]) -> str:
    """Return words as `a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


_SYNONYMS = {
    "learning_rate": "lr",
    "rate": "lr",
    "wd": "weight_decay",
    "epsilon": "eps",
    "betas": "beta1",
    "optimiser": "optimizer",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "num_epochs": "epochs",
    "n_epochs": "epochs",
    "bs": "batch_size",
    "val": "validation",
    "validation_data": "validation",
    "validation_split": "validation",
    "early_stopping": "patience",
    "grad_clip": "clip",
    "gradient_clip": "clip",
    "pytorch": "torch",
    "tf": "tensorflow",
    "ort": "onnxruntime",
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp16": "float16",
}
"""Names in other tools -> names in Onward."""


def suggest(name: str, names: Iterable[str], *, most: int = 3, likeness: float = 0.5) -> str | None:
    """Return a hint with the names that the user may have meant, or None."""

    def plain(name: str) -> str:  # `learning_rate` for `--Learning-Rate`
        return name.lstrip("-").lower().replace("-", "_")

    by_plain_name = {plain(other): other for other in names}
    word = plain(str(name))
    if (synonym := _SYNONYMS.get(word)) in by_plain_name:
        matches = [synonym]
    else:  # if some names are much alike, only these
        close = (difflib.get_close_matches(word, list(by_plain_name), most, least) for least in (0.8, likeness))
        matches = next(filter(None, close), [])
    return f"did you mean {' or '.join(f'`{by_plain_name[match]}`' for match in matches)}?" if matches else None


def suggest_or_list(name: str, candidates: Iterable[str], *, most: int = 6) -> str:
    """Return a hint with names that the user may have meant, or with the first existing names."""
    names = list(candidates)
    return suggest(name, names) or (f"there are {list_names(names, most)}" if names else "there are none")
