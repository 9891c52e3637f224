"""Saving a model: the layout of its tensors in files, and an order of writes that is crash-safe."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import onnx_ir as ir
from google.protobuf.message import EncodeError
from onnx import ModelProto

from onward.errors import ExternalDataError, InvalidModelError, WriteError
from onward.model.storage.checksums import Range, checksum_entry, stored_ranges
from onward.model.storage.data import Writers, is_own, spared_bytes, write_data
from onward.model.storage.external import (
    add_checksums,
    can_point_at,
    check_external,
    data_files,
    overlaps,
    record_borrowed,
)
from onward.model.storage.files import PathLike, listing, mentions, sync
from onward.model.storage.opening import OUTSIDE_HINT, PROTO_LIMIT, read_proto
from onward.model.storage.tensor_sites import (
    TensorSite,
    hold_open,
    in_file,
    inside,
    is_external,
    is_where_it_was_read,
    nbytes,
    outside,
    range_of,
)
from onward.model.storage.transaction import Transaction, target_of

External = Literal["auto", "overlay", "none", "data", "safetensors"]
_STAYING = ("auto", "overlay")
EMBED_LIMIT = int(1.9 * 2**30)  # protobuf holds 2 GiB; the graph needs room beside the tensors
SPARED_LIMIT = 2**29  # bytes of zeros and shared tensors from which a data file is worth it


def save(
    path: PathLike,
    to_proto: Callable[[], ModelProto],
    sites: Iterable[TensorSite],
    *,
    external: External = "auto",
    threshold_bytes: int = 1024,
    shard_bytes: int | None = None,
    shared: Set[Path] | None = None,
    also: Iterable[TensorSite] = (),
    writers: Writers | None = None,
    checksums: bool = False,
) -> None:
    """Write a model and its data files, or fail and leave everything as it was.

    `sites` are the tensor sites of all graphs and functions that `to_proto` serializes. During
    the call they hold what the new file will hold. Afterwards they are restored, unless their data
    file is gone: then they hold the replacement.

    `external` is the place of tensors of at least `threshold_bytes`:

    - `none`: the model file.
    - `data`: `<stem>.data`; with `shard_bytes`, several such files, each at most that large unless
      one tensor is larger.
    - `safetensors`: the same with `.safetensors` files, which others can read by the names of the
      initializers. Types that some readers lack (complex, less than 8 bits, unusual float8) are
      stored as plain bytes.
    - `auto`: outside if the model, or the one that it replaces, has external tensors, if they do
      not fit inside, or if many of them are zeros, which take space only inside. Tensors in a file
      that the new model can refer to, in its folder or below, stay there. Others are copied.
    - `overlay`: like `auto`, but copies are refused.

    Unchanged data of the replaced model stays in its data file. Attributes go outside only if they
    were. Zeros take no space in a new data file, if the file system has holes.

    `shared` is for a folder without other writers: the model refers to data files in it without
    copying them. The next save removes those that only the replaced model used.

    `also` are tensor sites of another model; they move to the new data file.

    `writers` are other processes, which write their ranges of divided tensors to the same file.

    With `checksums` the file lists the checksums of its bytes and of new data (`verify_checksums`).
    """
    if external not in get_args(External):
        raise WriteError(f"tensors cannot be stored as `{external}`", hint=f"use {', '.join(get_args(External))}")
    target = target_of(path)
    tensors, others = _tensors_at(sites), _tensors_at(also)
    with Transaction(target) as transaction:
        old = _replaced_files(target)
        plan = _plan(target, tensors, set(old), shared, external, threshold_bytes)
        moved = {site: tensor for site, tensor in others.items() if _is_large(site, tensor, threshold_bytes)}
        ranges: dict[str, list[Range]] | None = {} if checksums else None
        data = write_data(plan.written | moved, plan.suffix, target, transaction, shard_bytes, writers, ranges)
        future = plan.staying_tensors | plan.embedded | data
        with _holding({site: future[site] for site in tensors if site in future}):
            proto = to_proto()
            places = [range_of(tensor) for tensor in plan.staying_tensors.values()]
            files = {where[0] for where in places if where and not is_own(target, where[0])}
            record_borrowed(proto, target.parent, files - (shared or set()))
            payload, used = _serialise(proto, target, old)
        for name, others_ranges in writers.finish().items() if writers is not None else ():
            if ranges is not None:
                ranges.setdefault(name, []).extend(others_ranges)
        entry = b""
        if ranges is not None:
            before = stored_ranges(target) or {}
            unchanged = {name: listed for name, listed in before.items() if target.with_name(name) in used}
            entry = checksum_entry(payload, unchanged | ranges)
        transaction.commit(payload, entry if len(payload) + len(entry) <= PROTO_LIMIT else b"")
    for site, tensor in others.items():
        if site in moved:
            site.tensor = _open_tensor(data[site])
        elif is_external(tensor):
            site.tensor = inside(tensor, tensor.numpy().copy())
    if not sync(target.parent, strict=False):
        return  # after a power failure the old model may be back, and need its data
    written = {where[0] for site in data if (where := range_of(data[site]))}
    if shared is None:
        obsolete = _obsolete(target, old.keys() - used)
    else:  # also files that no model uses, such as those of the version before last
        present = {target.parent / entry.name for entry in listing(target.parent)}
        obsolete = _obsolete(target, present - used - written - old.keys())
    for site, tensor in tensors.items():  # before the files go: the model in memory may read them
        if (where := range_of(tensor)) and where[0] in obsolete:
            site.tensor = _open_tensor(future[site])
    for file in obsolete:
        with suppress(OSError):
            file.unlink()


def goes_outside(sites: Iterable[TensorSite]) -> bool:
    """True if a model has external tensors, or is too large for one file."""
    tensors = _tensors_at(sites).values()
    return any(map(is_external, tensors)) or sum(map(nbytes, tensors)) > EMBED_LIMIT


def form_of(sites: Iterable[TensorSite]) -> External:
    """Return the value of `external` that describes the tensors of a model."""
    endings = {where[0].suffix for tensor in _tensors_at(sites).values() if (where := range_of(tensor))}
    return "auto" if not endings else "safetensors" if endings == {".safetensors"} else "data"


def data_files_of(path: PathLike) -> list[Path]:
    """Return the data files of a model file."""
    return list(_replaced_files(Path(os.path.realpath(path))))


def _tensors_at(sites: Iterable[TensorSite]) -> dict[TensorSite, ir.TensorProtocol]:
    return {site: tensor for site in sites if (tensor := site.tensor) is not None}


def _open_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if not isinstance(tensor, ir.ExternalTensor) or (file := hold_open(Path(tensor.path))) is None:
        return tensor
    return in_file(tensor, file)


@dataclass
class _Plan:
    """The new tensors of sites that change; `written` goes into new data files."""

    staying_tensors: dict[TensorSite, ir.TensorProtocol]
    embedded: dict[TensorSite, ir.TensorProtocol]
    written: dict[TensorSite, ir.TensorProtocol]
    suffix: str


def _plan(
    target: Path,
    tensors: dict[TensorSite, ir.TensorProtocol],
    old: set[Path],
    shared: Set[Path] | None,
    external: str,
    threshold: int,
) -> _Plan:
    ranges = {site: where for site, tensor in tensors.items() if (where := range_of(tensor))}
    keep = _kept_files(target, set(ranges.values()), old, external) | (shared or set())
    staying = {site for site in ranges if ranges[site][0] in keep and is_where_it_was_read(tensors[site])}
    if external in _STAYING and shared is None:
        staying |= _staying(target, ranges, tensors)
    if external == "overlay":
        _refuse_copies(target, {site: where[0] for site, where in ranges.items() if site not in staying})
    staying_tensors = {site: outside(tensors[site], target.parent, *ranges[site][:2]) for site in staying}
    moving = {site: tensor for site, tensor in tensors.items() if site not in staying_tensors}
    total = sum(nbytes(tensor) for tensor in moving.values())
    if external == "none" and total > PROTO_LIMIT:
        raise WriteError(f"could not write `{target}`: more than 2 GiB do not fit into one file", hint=OUTSIDE_HINT)
    files = old | {file for file, _, _ in ranges.values()}
    spill = external != "none"
    if external in _STAYING:
        spill = bool(files) or total > EMBED_LIMIT or spared_bytes(moving) > SPARED_LIMIT
    written = {site: tensor for site, tensor in moving.items() if spill and _is_large(site, tensor, threshold)}
    embedded = {site: inside(tensors[site]) for site in ranges if site in moving and site not in written}
    is_safe = external == "safetensors" or (
        external in _STAYING and files and {file.suffix for file in files} == {".safetensors"}
    )
    return _Plan(staying_tensors, embedded, written, "safetensors" if is_safe else "data")


def _is_large(site: TensorSite, tensor: ir.TensorProtocol, threshold: int) -> bool:
    return nbytes(tensor) >= max(threshold, 1) and (isinstance(site.holder, ir.Value) or is_external(tensor))


def _kept_files(target: Path, ranges: set[tuple[Path, int, int]], old: set[Path], external: str) -> set[Path]:
    """Return the data files of the replaced model that the new one uses.

    Generated files must be used by half at least, or a model that changes often would grow without
    limit.
    """
    used: dict[Path, int] = defaultdict(int)
    for file, _, size in ranges:
        used[file] += size
    reused = set()
    for file in old & used.keys() if external != "none" else ():
        fits = external in _STAYING or (external == "safetensors") == (file.suffix == ".safetensors")
        if fits and (not is_own(target, file) or used[file] * 2 >= file.stat().st_size):
            reused.add(file)
    return reused


def _staying(
    target: Path, ranges: dict[TensorSite, tuple[Path, int, int]], tensors: dict[TensorSite, ir.TensorProtocol]
) -> set[TensorSite]:
    """Return the sites whose tensors stay in files outside the replaced model."""
    by_file: dict[Path, dict[tuple[int, int], list[TensorSite]]] = defaultdict(lambda: defaultdict(list))
    for site, (file, start, size) in ranges.items():
        if size and start * 8 % tensors[site].dtype.bitwidth == 0:  # unaligned numbers are copied
            by_file[file][start, start + size].append(site)
    staying = set()
    for file, sites_by_range in by_file.items():
        if can_point_at(target.parent, file) and not is_own(target, file) and not _may_be_deleted(target, file):
            tangled = {late for late, _ in overlaps(sites_by_range)}
            staying |= {site for where, sites in sites_by_range.items() if where not in tangled for site in sites}
    return {site for site in staying if is_where_it_was_read(tensors[site])}


def _may_be_deleted(target: Path, file: Path) -> bool:
    """True if a save may delete a file of another model: only `.onnx` files protect it."""
    if file.parent == target.parent and target.name.endswith(".onnx"):
        return False
    models = [entry.name for entry in listing(file.parent) if entry.name.endswith(".onnx")]
    return any(is_own(file.with_name(name), file) for name in models)


def _refuse_copies(target: Path, copied: dict[TensorSite, Path]) -> None:
    for site, file in copied.items():
        if not is_own(target, file):
            raise WriteError(
                f"could not write `{target}`: it cannot point at `{site.name}` in `{file}`",
                hint=f"write into `{file.parent}`, or copy the tensors: `auto`, `data` or `safetensors`",
            )


@contextmanager
def _holding(future: dict[TensorSite, ir.TensorProtocol]) -> Iterator[None]:
    past = [(site, site.tensor) for site in future]
    try:
        for site, tensor in future.items():
            site.tensor = tensor
        yield
    finally:
        for site, before in past:
            site.tensor = before


def _serialise(proto: ModelProto, target: Path, old: dict[Path, str]) -> tuple[bytes, set[Path]]:
    """Return the bytes of the model file, and its data files, which must exist."""
    check_external(proto, target.parent)
    add_checksums(proto, target.parent, old)  # still true: no file that exists is written to
    with suppress(EncodeError):
        payload = proto.SerializeToString()
        if len(payload) <= PROTO_LIMIT:
            return payload, set(data_files(proto, target.parent))
    raise WriteError(f"could not write `{target}`: more than 2 GiB do not fit into one file", hint=OUTSIDE_HINT)


def _replaced_files(target: Path) -> dict[Path, str]:
    """Return the data files of the model at `target`; empty unless it is an intact model."""
    if not target.exists() or not mentions(target, "location"):  # do not parse large models without data files
        return {}
    try:
        proto = read_proto(target)
        check_external(proto, target.parent)
    except (InvalidModelError, ExternalDataError):
        return {}
    return data_files(proto, target.parent)


def _obsolete(target: Path, files: set[Path]) -> set[Path]:
    """Return generated files that no other model mentions, such as a copy of the replaced one."""
    own = {file for file in files if is_own(target, file)}
    others = [entry for entry in listing(target.parent) if entry.name.endswith(".onnx") and entry.name != target.name]
    return {file for file in own if not any(mentions(other.path, file.name) for other in others)}
