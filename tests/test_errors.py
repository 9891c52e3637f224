"""Errors in Python: the hint is where the message is, once, and goes with it into another process."""

from __future__ import annotations

import inspect
import pickle
import traceback

import pytest
from commands import failed
from models import digits_mlp

import onward
from onward import errors
from onward.errors import Error, UnsupportedError, default_hint, first_line, message_of

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Error)]


@pytest.mark.parametrize("kind", CLASSES)
def test_the_hint_is_said_once(kind):
    try:
        raise kind("there is no loss", hint="give a `loss`")
    except Error as raised:
        error = raised
    assert str(error) == "there is no loss\nhint: give a `loss`"
    assert error.args == ("there is no loss",)
    said = "".join(traceback.format_exception(error))
    assert said.count("hint: give a `loss`") == said.count("there is no loss") - 1 == 1  # once in the line of source
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.hint) == (kind, str(error), error.hint)


def test_an_error_without_a_hint_is_its_message():
    assert str(UnsupportedError("that is all")) == "that is all"


def test_advice_that_comes_later_is_said():
    with pytest.raises(Error, match="no kernel\nhint: take another engine"), default_hint("take another engine"):
        raise UnsupportedError("no kernel")


def test_a_message_is_quoted_without_its_hint():
    error = UnsupportedError("no kernel", hint="take another engine")
    assert message_of(error) == first_line(error) == "no kernel"
    assert message_of(ValueError("no number")) == "no number"
    assert first_line(ValueError()) == "ValueError"


def test_hints_on_the_command_line_and_in_python(tmp_path):
    path = tmp_path / "model.onnx"
    onward.load(digits_mlp(8)).save(path)
    with pytest.raises(Error) as raised:
        onward.prepare(path, loss="cross_entropi")
    message, hint = failed("prepare", str(path), "--loss", "cross_entropi")
    assert hint and str(raised.value) == f"{message}\nhint: {hint}"
