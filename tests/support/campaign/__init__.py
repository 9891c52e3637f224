"""Campaigns of hostile files, of every kind that Onward reads: `python -m campaign KIND FIRST COUNT`, in `tests`.

A kind is a row in one of the tables that `kinds.py` collects: how good files are made, how each of them is damaged,
and what is then done with them. Every case is a process of its own, with limits on time and memory, and is watched: it
may end well or with one error of ours, reads and writes only what it was given, and executes nothing. A case is its
number: the same number is the same damage.

    mutations.py   damages to bytes, by format
    sandbox.py     one case: the process, its limits, what it must not do
    kinds.py       all kinds; `Kind` says what one consists of
    models.py      ONNX models, and so a file for each further family
"""
