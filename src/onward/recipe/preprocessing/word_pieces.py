"""Words as pieces of a vocabulary, longest first from the left, as WordPiece does.

A word in the vocabulary is one piece. For others, patterns find the bits of the vocabulary index of
the character at each position. Pieces are paths in a tree of characters. Its edges are looked up by
number, at all positions of all words at once, and a walk from piece to piece collects them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import RecipeError
from onward.standard import ML_DOMAIN

ML_OPSET = 3
"""Domain of LabelEncoder, which looks up keys."""
_BLOCK = 16
"""Characters of words per block; later blocks run only if some word is as long."""
_CONTINUED = "##"
"""Prefix of pieces that continue a word."""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Token indices, [N, K], and a mask of real pieces."""

    ids: Expr
    is_piece: Expr

    @classmethod
    def whole(cls, words: Expr, is_word: Expr, vocabulary: Mapping[str, int], unknown: int) -> Pieces:
        """Return each word as one piece."""
        return cls(look_up(words, vocabulary, unknown), is_word)


def look_up(words: Expr, table: Mapping[str, int], other: int) -> Expr:
    numbers: Expr = words.op.node(
        ML_DOMAIN,
        "LabelEncoder",
        words,
        keys_strings=list(table),
        values_int64s=list(table.values()),
        default_int64=other,
    )
    numbers.value.type, numbers.value.shape = ir.TensorType(ir.DataType.INT64), words.value.shape
    return numbers


def split_words(words: Expr, is_word: Expr, vocabulary: Mapping[str, int], unknown: int, *, longest: int) -> Pieces:
    """Return the pieces of words, [N, L], as [N, L * P]; without pieces, a word is unknown."""
    if not isinstance(longest, int) or isinstance(longest, bool) or not 1 <= longest <= 1000:
        raise RecipeError(f"`longest` of `tokenize` is `{longest}`, but must be an integer from 1 to 1000")
    op = words.op
    whole = look_up(words, vocabulary, -1)
    others = op.NonZero(op.And(op.Less(whole, np.int64(0)), is_word))  # [2, M]
    positions = op.Transpose(others, perm=[1, 0])
    tree = _Tree.of(vocabulary)
    tokens, ends = tree.matches(op.GatherND(words, positions), longest)
    pieces = _walk(tokens, ends, unknown)  # [M, P]
    count = op.Slice(op.Shape(pieces), [1], [2])
    shape = op.Concat(op.Shape(words), count, axis=0)
    first = op.Equal(_range(op, op.Squeeze(count)), np.int64(0))
    table = op.Where(first, op.Unsqueeze(whole, [2]), op.Expand(np.int64(-1), shape))  # [N, L, P]
    table = op.Reshape(op.ScatterND(table, positions, pieces), [0, -1])
    listed = op.Reshape(op.Expand(op.Unsqueeze(is_word, [2]), shape), [0, -1])
    return Pieces(table, op.And(op.GreaterOrEqual(table, np.int64(0)), listed))


def _walk(tokens: Expr, steps: Expr, unknown: int) -> Expr:
    """Return the pieces on the walk from the first character: [M, P], padded with -1.

    `tokens` and `steps`, [M, W + 1], are the piece at each position and its length: 0 for none, -1
    at the end of a word."""
    op = tokens.op
    rows = op.Slice(op.Shape(tokens), [0], [1])
    start = op.ConstantOfShape(op.Concat(rows, [1], axis=0), value=ir.tensor(np.zeros(1, np.int64)))

    def move(op: Builder, i: Expr, going: Expr, at: Expr) -> tuple[Expr, ...]:
        step = op.GatherElements(steps, at, axis=1)
        piece = op.Where(op.Less(step, np.int64(0)), np.int64(-1), op.GatherElements(tokens, at, axis=1))
        there = at + op.Max(step, np.int64(0))
        is_moving = op.Greater(op.GatherElements(steps, there, axis=1), np.int64(0))
        again = op.Cast(op.ReduceMax(op.Cast(is_moving, to=ir.DataType.INT64), keepdims=0), to=ir.DataType.BOOL)
        return again, there, piece

    trips = op.Squeeze(op.Shape(tokens, start=1))
    at, pieces = op.Loop(
        trips, True, start, outputs=2, body=op.subgraph(move, loop_inputs(ir.DataType.INT64))
    )  # [P, M, 1]
    pieces = op.Squeeze(op.Transpose(pieces, perm=[1, 0, 2]), [2])
    is_stuck = op.Equal(op.GatherElements(steps, at, axis=1), np.int64(0))  # [M, 1]
    first = op.Equal(_range(op, op.Squeeze(op.Shape(pieces, start=1))), np.int64(0))
    alone = op.Where(first, np.int64(unknown), np.int64(-1))
    return op.Where(is_stuck, alone, pieces)


@dataclasses.dataclass(frozen=True)
class _Tree:
    """Tokens as paths of characters: from node 0 beginnings of words, from node 1 the rest."""

    alphabet: Sequence[str]
    edges: Mapping[tuple[int, int], int]
    """(node, index of a character from 1) -> node."""
    tokens: Sequence[int]
    """Index of the token that ends at each node, or -1."""
    depth: int

    @classmethod
    def of(cls, vocabulary: Mapping[str, int]) -> _Tree:
        paths = [(1, token[2:]) if token.startswith(_CONTINUED) else (0, token) for token in vocabulary]
        alphabet = sorted({character for _, path in paths for character in path})
        numbers = {character: number for number, character in enumerate(alphabet, start=1)}
        edges: dict[tuple[int, int], int] = {}
        tokens = [-1, -1]
        for (root, path), token in zip(paths, vocabulary.values(), strict=True):
            node = root
            for character in path:
                edge = (node, numbers[character])
                if edge not in edges:
                    edges[edge] = len(tokens)
                    tokens.append(-1)
                node = edges[edge]
            if path:
                tokens[node] = token
        return cls(alphabet, edges, tokens, max((len(path) for _, path in paths), default=0))

    def matches(self, words: Expr, longest: int) -> tuple[Expr, Expr]:
        """Return the longest token at each position of words, [M, W + 1], and its length.

        The length is -1 at the end of a word. A word with unknown or too many characters has none.
        """
        op = words.op
        characters = self._characters(words, longest)  # [M, W], 0 where there is none
        width = op.Squeeze(op.Shape(characters, start=1))
        padded = op.Pad(characters, np.asarray([0, 0, 0, self.depth + 1], np.int64))
        roots = op.Cast(op.Greater(_range(op, width + 1), np.int64(0)), to=ir.DataType.INT64)
        zeros = op.Slice(padded, [0], op.Unsqueeze(width + 1, [0]), [1]) * 0

        def extend(op: Builder, i: Expr, going: Expr, *state: Expr) -> tuple[Expr, ...]:
            node, token, length = state
            here = op.Slice(padded, op.Unsqueeze(i, [0]), op.Unsqueeze(i + width + 1, [0]), [1])
            node = self._follow(op, node, here)
            ended = op.Gather(np.asarray(self.tokens, np.int64), op.Max(node, np.int64(0)))
            is_token = op.And(op.GreaterOrEqual(ended, np.int64(0)), op.GreaterOrEqual(node, np.int64(0)))
            return going, node, op.Where(is_token, ended, token), op.Where(is_token, i + 1, length)

        start = zeros + roots, zeros - 1, zeros
        body = op.subgraph(extend, loop_inputs(*[ir.DataType.INT64] * 3))
        _, token, length = op.Loop(np.int64(self.depth), True, *start, outputs=3, body=body)
        is_known = op.RegexFullMatch(words, pattern=f"[{_class(self.alphabet)}]+")
        # Two patterns: a large class, repeated, needs more memory than RE2 allows.
        is_good = op.And(is_known, op.RegexFullMatch(words, pattern=f"(?s).{{1,{longest}}}"))
        is_end = op.Equal(op.Slice(padded, [0], op.Unsqueeze(width + 1, [0]), [1]), np.int64(0))
        length = op.Where(is_end, np.int64(-1), length)
        length = op.Where(op.Unsqueeze(is_good, [1]), length, op.constant(np.int64(0)))
        return token, length

    def _follow(self, op: Builder, node: Expr, character: Expr) -> Expr:
        """Return the node behind an edge, numbered by node and character, or -1."""
        count = len(self.alphabet) + 1
        where = op.Where(op.Less(node, np.int64(0)), np.int64(-1), node * count + character)
        there: Expr = op.node(
            ML_DOMAIN,
            "LabelEncoder",
            where,
            keys_int64s=[node * count + number for node, number in self.edges],
            values_int64s=list(self.edges.values()),
            default_int64=-1,
        )
        there.value.type = ir.TensorType(ir.DataType.INT64)
        return there

    def _characters(self, words: Expr, longest: int) -> Expr:
        """Return the index of each character, [M, longest], from 1; skip empty blocks."""
        op = words.op
        blocks = []
        for first in range(0, longest, _BLOCK):
            places = range(first, min(first + _BLOCK, longest))
            if not first:
                blocks.append(self._block(op, words, places))
                continue
            reach = op.Cast(op.RegexFullMatch(words, pattern=f"(?s).{{{first}}}.+"), to=ir.DataType.INT64)
            is_reached = op.Greater(op.ReduceSum(reach, keepdims=0), np.int64(0))

            def read(op: Builder, places: range = places) -> Expr:
                return self._block(op, words, places)

            def skip(op: Builder) -> Expr:
                rows = op.Shape(words)
                shape = op.Concat(rows, np.zeros(1, np.int64), axis=0)
                return op.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, np.int64)))

            characters = op.If(is_reached, then_branch=op.subgraph(read), else_branch=op.subgraph(skip))
            characters.value.type, characters.value.shape = ir.TensorType(ir.DataType.INT64), None
            blocks.append(characters)
        return blocks[0] if len(blocks) == 1 else op.Concat(*blocks, axis=1)

    def _block(self, op: Builder, words: Expr, places: range) -> Expr:
        columns = []
        for position in places:
            number: Expr | None = None
            for bit in range(len(self.alphabet).bit_length()):
                members = [character for at, character in enumerate(self.alphabet, start=1) if at >> bit & 1]
                is_set = op.RegexFullMatch(words, pattern=f"(?s).{{{position}}}[{_class(members)}].*")
                worth = op.Cast(is_set, to=ir.DataType.INT64) * (1 << bit)
                number = worth if number is None else number + worth
            assert number is not None
            columns.append(op.Unsqueeze(number, [1]))
        return columns[0] if len(columns) == 1 else op.Concat(*columns, axis=1)


def _class(characters: Sequence[str]) -> str:
    codes = sorted(map(ord, characters))
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in ranges)


def _escaped(code: int) -> str:
    character = chr(code)
    return re.escape(character) if character.isascii() and not character.isalnum() else character


def loop_inputs(*state: ir.DataType) -> list[ir.Value]:
    """Return the inputs of a Loop body: iteration, condition, and carried values."""
    return [
        ir.Value(name="i", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([])),
        ir.Value(name="going", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([])),
        *(ir.Value(name="state", type=ir.TensorType(dtype)) for dtype in state),
    ]


def _range(op: Builder, count: Expr) -> Expr:
    return op.Range(np.int64(0), count, np.int64(1))
