"""Every error that Onward raises on purpose: a sentence that says what is wrong, and a hint that says what to do."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence

_PACKAGE = os.path.dirname(__file__) + os.sep


class Error(Exception):
    """Base of all errors a user can cause: `error.message` is the fact, `error.hint` what to do about it.

    `str(error)`, and so a traceback, shows both: the message, then `hint: ...` on a line of its own. Both often quote
    files, and print as text whatever those hold.
    """

    def __init__(self, message: str, *, hint: str | None = None):
        self.message = safe(message)
        self.hint = safe(hint) if hint is not None else None
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class InvalidModelError(Error, ValueError):
    """The bytes are not an ONNX model, or the model breaks a rule that reading it depends on."""


class ExternalDataError(Error, OSError):
    """External data is missing, too short, overlapping, or outside the model's folder."""


class WriteError(Error, OSError):
    """A file could not be written. What was there before is still there."""


class RecipeError(Error, ValueError):
    """A recipe does not fit the model, or is written wrongly."""


class DataError(Error, ValueError):
    """Data to train on is missing, damaged, changed while it was read, or does not fit the model."""


class TrainingError(Error, ArithmeticError):
    """A run that cannot go on: its loss is not finite."""


class OutOfMemoryError(Error, MemoryError):
    """A step needs more memory than a device has, or there is too little to read or to import something."""


class MismatchError(Error, ArithmeticError):
    """Two sides of a conversion do not compute the same."""


class ArgumentError(Error, TypeError):
    """A function was called with an argument that it does not have, without one that it needs, or of another type."""


class UnknownNameError(Error, KeyError):
    """A name or pattern matches nothing."""


class UnsupportedError(Error, NotImplementedError):
    """Something valid that Onward does not do (yet)."""


@contextlib.contextmanager
def default_hint(hint: str) -> Iterator[None]:
    """What to do about all that goes wrong inside, and has no hint of its own."""
    try:
        yield
    except Error as error:
        error.hint = error.hint or safe(hint)
        raise


def warn(message: str) -> None:
    """Warn of something that can be done, but is hardly meant, at the line that called Onward."""
    stack = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1))]
    ours = [depth for depth, file in enumerate(stack, 2) if file.startswith(_PACKAGE)]
    warnings.warn(message, stacklevel=max(ours, default=1) + 1)


MEMORY_HINT = "close other programs, or raise the limit (`ulimit -v`, or that of the container)"


def lacks_memory(error: BaseException) -> bool:
    """True if there was not enough memory."""
    signs = ("cannot allocate memory", "failed to map segment")
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in signs)


@contextlib.contextmanager
def needing_memory(purpose: str) -> Iterator[None]:
    """Explain within it what there was not enough memory to do. The loader of libraries raises ImportError for that."""
    try:
        yield
    except (MemoryError, OSError, ImportError) as error:
        if isinstance(error, Error) or not lacks_memory(error):
            raise
        raise OutOfMemoryError(f"not enough memory to {purpose}", hint=MEMORY_HINT) from error


def safe(text: str) -> str:
    """Text from a file or a user, without characters that would move a cursor, change colours or end a line early."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def message_of(error: BaseException) -> str:
    """Return the message of an error, without its hint, to quote it in another one."""
    return error.message if isinstance(error, Error) else str(error)


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, or its class if it has none."""
    return message_of(error).strip().partition("\n")[0] or type(error).__name__


def list_names(names: Sequence[str], most: int) -> str:
    """The first names for a sentence, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + more


def alternatives(words: Sequence[str]) -> str:
    """`a, b or c`."""
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
"""What other tools call what has another name here."""
_CLEAR = 0.8


def suggest(name: str, known: Iterable[str], *, most: int = 3, likeness: float = 0.5) -> str | None:
    """A hint that names what the user may have meant, or None when nothing is close."""
    lower = {_plain(other): other for other in known}
    word = _plain(str(name))
    synonym = _SYNONYMS.get(word)
    found = [difflib.get_close_matches(word, list(lower), most, least) for least in (_CLEAR, likeness)]
    matches = [synonym] if synonym in lower else found[0] or found[1]  # beside a clear match, others only confuse
    return f"did you mean {' or '.join(f'`{lower[match]}`' for match in matches)}?" if matches else None


def _plain(name: str) -> str:
    """A name as it is compared: `--Learning-Rate` is `learning_rate`."""
    return name.lstrip("-").lower().replace("-", "_")


def suggest_or_list(name: str, known: Iterable[str], *, most: int = 6) -> str:
    """A hint that names what the user may have meant, or the first of what there is."""
    names = list(known)
    return suggest(name, names) or (f"there are {list_names(names, most)}" if names else "there are none")
