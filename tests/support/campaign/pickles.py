"""Pickles that are small and describe much: shared parts, deep or endless trees, giant numbers and texts."""

from __future__ import annotations

import io
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from itertools import count

from campaign.checkpoints import convert, go_on, look, with_its_model
from campaign.kinds import Kind

_TIMES = (2, 5, 20, 60, 300)
_DEPTHS = (10, 150, 1_000, 100_000)
_NAMES = (
    b"os\nsystem", b"torch\nSize", b"numpy\ndtype", b"numpy._core.multiarray\n_reconstruct", b"_codecs\nencode",
    b"numpy._core.multiarray\nscalar", b"builtins\nset", b"builtins\nfrozenset", b"builtins\ncomplex",
    b"collections\nOrderedDict", b"collections\ndefaultdict", b"torch._utils\n_rebuild_tensor_v2",
    b"torch._utils\n_rebuild_parameter", b"argparse\nNamespace", b"x" * 5_000 + b"\ny",
)  # fmt: skip
_KEYS = (
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    "hyper_parameters",
    "loops",
    "epoch",
    "global_step",
    "rng",
    "x",
)


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


class _Bomb:
    """Operations of a pickle that push one value, drawn at random."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._places: Iterator[int] = count(1 << 16)
        self._shared: list[bytes] = []

    def value(self, depth: int = 3) -> bytes:
        kinds = (self._leaf, self._doubled, self._deep, self._endless, self._repeated, self._called, self._outside)
        kinds += (
            self._doubled,
            self._doubled,
            self._held,
            self._optimizer,
            self._colliding,
            self._again,
            self._operations,
        )
        return self._rng.choice(kinds if depth else (self._leaf, self._doubled, self._again))(depth - 1)

    def _keep(self) -> tuple[bytes, bytes]:
        """Operations that put the topmost value into a place, and that get it from there."""
        place = struct.pack("<I", next(self._places))
        self._shared.append(b"j" + place)
        return b"r" + place, self._shared[-1]

    def _leaf(self, depth: int) -> bytes:
        size = self._rng.choice((1, 200, 2_000, 100_000))
        return self._rng.choice(
            (
                b"N", b"K\x05", b"G?\xb9\x99\x99\x99\x99\x99\x9a", _text("x" * size),
                b"B" + struct.pack("<I", size) + bytes(size),
                b"\x8b" + struct.pack("<i", size) + b"\x7f" * size, b"I" + b"9" * size + b"\n", b"F1e999\n",
                b"V" + b"\\u1234" * size + b"\n", b"\x8e" + struct.pack("<Q", 1 << 62),
                b"\x96" + struct.pack("<Q", 1 << 60),
            )
        )  # fmt: skip

    def _pair(self, first: bytes, second: bytes, kind: int | None = None) -> bytes:
        named = _text("a") + first + _text("b") + second
        forms = (
            first + second + b"\x86", b"](" + first + second + b"e", b"}(" + named + b"u",
            b"ccollections\nOrderedDict\n)R(" + named + b"u", b"ca\nNode\n" + first + second + b"\x86R",
            b"ca\nNode\n)R" + first + second + b"\x86b", b"ccollections\nOrderedDict\n)R" + first + b"b",
        )  # fmt: skip
        return self._rng.choice(forms) if kind is None else forms[kind % len(forms)]

    def _key(self, key: bytes) -> bytes:
        """A value that Python hashes."""
        return self._rng.choice(
            (
                b"}" + key + b"Ns", b"}(" + key + b"Nu", b"(" + key + b"Nd",
                b"\x8f(" + key + b"\x90", b"(" + key + b"\x91",
                b"cbuiltins\nset\n](" + key + b"e\x85R", b"ccollections\nOrderedDict\n](" + key + b"N\x86e\x85R",
            )
        )  # fmt: skip

    def _doubled(self, depth: int) -> bytes:
        """A value that holds the one before twice, so many times; or a key that does."""
        kind = self._rng.randrange(14) if self._rng.random() < 0.7 else 0
        data = self._rng.choice((b")", b"N", b"](K\x01e"))
        for _ in range(self._rng.choice(_TIMES)):
            put, get = self._keep()
            data += put + b"0" + self._pair(get, get, kind)
        return self._key(data) if kind == 0 and self._rng.random() < 0.5 else data

    def _deep(self, depth: int) -> bytes:
        times = self._rng.choice(_DEPTHS)
        return self._rng.choice(
            (
                b")" + b"\x85" * times, b"]" * times + b"a" * (times - 1),
                b"}" + (_text("a") + b"}") * (times - 1) + b"s" * (times - 1),
                b"ca\nB\n)R" + b"\x85" * times,
            )
        )  # fmt: skip

    def _endless(self, depth: int) -> bytes:
        put, get = self._keep()
        return self._rng.choice(
            (
                b"]" + put + get + b"a", b"}" + put + _text("a") + get + b"s", b"](" + put + get + get + b"e",
                b"]" + put + get + b"\x85a", b"ca\nNode\n)R" + put + b"}" + _text("parent") + get + b"sb",
                b"ccollections\nOrderedDict\n)R" + put + get + b"b",
                b"ccollections\nOrderedDict\n)R" + put + get + b"\x85b",
            )
        )  # fmt: skip

    def _repeated(self, depth: int) -> bytes:
        """A value that is there many times."""
        put, get = self._keep()
        return b"](" + self.value(max(depth, 0)) + put + get * self._rng.choice((10, 1_000, 20_000)) + b"e"

    def _called(self, depth: int) -> bytes:
        name, argument = b"c" + self._rng.choice(_NAMES) + b"\n", self.value(max(depth, 0))
        put, get = self._keep()
        call = self._rng.choice((b"R", b"\x81"))
        return self._rng.choice(
            (
                name + argument + call, name + argument + b"\x85" + call,
                name + argument + put + b"0" + get + get + b"\x86" + call,
                b"](" + argument + put + (name + get + b"\x85" + call) * self._rng.choice((3, 300)) + b"e",
                b"(" + argument + b"i" + name[1:], name + b")R" + argument + b"b", name + b")R(" + argument + b"e",
            )
        )  # fmt: skip

    def _outside(self, depth: int) -> bytes:
        storage = b"(" + _text("storage") + b"ctorch\nFloatStorage\n"
        return self._rng.choice((self.value(0) + b"Q", storage + self.value(0) + _text("cpu") + b"K\x01tQ", b"Pxy\n"))

    def _held(self, depth: int) -> bytes:
        depth = max(depth, 0)
        return self._pair(self.value(depth), self.value(depth))

    def _optimizer(self, depth: int) -> bytes:
        """The state of one, in which something is a bomb."""
        value = [b"K\x01", b"K\x02", b"K\x03", b"N", b"](K\x00K\x01e", b"}"]
        value[self._rng.randrange(len(value))] = self.value(0)
        lr, betas, eps, decay, numbers, state = value
        named = zip(("lr", "betas", "eps", "weight_decay", "params"), (lr, betas, eps, decay, numbers), strict=True)
        group = b"}(" + b"".join(_text(key) + held for key, held in named) + b"u"
        return b"]}(" + _text("state") + state + _text("param_groups") + b"]" + group + b"aua"

    def _colliding(self, depth: int) -> bytes:
        """Keys that all have the same hash."""
        numbers = (pickle.encode_long(n * ((1 << 61) - 1)) for n in range(1, self._rng.choice((9, 30_000))))
        return b"}(" + b"".join(b"\x8a" + bytes([len(n)]) + n + b"N" for n in numbers) + b"u"

    def _again(self, depth: int) -> bytes:
        return self._rng.choice(self._shared) if self._shared else b"N"

    def _operations(self, depth: int) -> bytes:
        """Many operations that lead to little."""
        times = self._rng.choice((100, 100_000))
        one = self._rng.choice((b"N0", b"]0", b"\x8f0", b"(1", b"N\x940", b"N200", b"\x95" + struct.pack("<Q", 1)))
        return b"N" + one * times


def _exploding(rng: random.Random, data: bytes) -> bytes:
    """A checkpoint in which some of the outermost entries are bombs, or whose members are packed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    main = next(name for name in members if name.endswith("/data.pkl"))
    bomb = _Bomb(rng)
    entries = b"".join(_text(rng.choice(_KEYS)) + bomb.value() + b"s" for _ in range(rng.choice((1, 1, 2, 4))))
    content = members[main][:-1] + entries + b"."
    if rng.random() < 0.1:
        content = members[main][:2] + bomb.value() + b"."
    if rng.random() < 0.1:
        content = b"\x80" + bytes([rng.choice((0, 1, 3, 4, 5, 6, 255))]) + content[2:]
    members[main] = content
    packed = main if rng.random() < 0.05 else rng.choice([*members]) if rng.random() < 0.05 else None
    if packed is not None:
        members[packed] += rng.choice((b"", b"](" * (8 << 20), bytes(64 << 20)))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content, zipfile.ZIP_DEFLATED if name == packed else zipfile.ZIP_STORED)
    return made.getvalue()


_FILE = "lightning.ckpt"
_OUT: tuple[Callable[[], object], ...] = tuple(convert(_FILE, format) for format in ("torch", "dcp", "lightning"))
KINDS = {
    "pickles with sharing and bombs": Kind(
        with_its_model,
        {f"*{_FILE}": (_exploding,)},
        (
            ("show", _FILE),
            ("show", _FILE, "--json"),
            ("show", _FILE, "--params"),
            ("show", _FILE, "--unsafe"),
            ("diff", _FILE, _FILE),
            ("convert", _FILE, "--like", "model.onnx", "--loss", "mse", "-o", "out.onnx"),
            look(_FILE),
            go_on,
            *_OUT,
        ),
    ),
}
