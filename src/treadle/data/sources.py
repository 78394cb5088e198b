"""What to read: files, folders, globs, addresses that fsspec knows, and sources of other packages.

Another package adds a source of documents through an entry point; `treadle data prepare wiki://simple` then calls it:

    [project.entry-points."treadle.sources"]
    wiki = "their_package:documents"

    def documents(argument: str) -> Iterable[str | dict]:    # "simple" here
        yield "the text of a document"
        yield {"messages": [{"role": "user", "content": "..."}, ...]}

It must yield the same documents in the same order every time, since an interrupted preparation goes on by skipping
those that it has.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.config import Settings, UserError
from treadle.config.plugins import Parts
from treadle.config.progress import progress

Document = str | Mapping[str, Any]
sources: Parts[Callable[[str], Iterable[Document]]] = Parts("source")


class Source(Settings):
    """One file (a local path or an address), or one part of another package. `stamp` changes when the file does."""

    name: str
    bytes: int | None = None
    stamp: str = ""
    part: str | None = None
    named: bool = False  # the user named this very file, it was not found in a folder


def expand(addresses: Sequence[str], exclude: Sequence[str] = (), output: Path | None = None) -> list[Source]:
    """Return every file that `addresses` stand for, each once: in the order of the addresses, then of the paths.

    `exclude` holds patterns matched against whole paths (`*` spans folders too). Hidden files and folders are left out
    where a folder is read, and so is `output`, the folder that is being written.
    Raises UserError for an address that is missing, matches nothing or has an unknown scheme.
    """
    found: dict[str, Source] = {}
    with progress("Looking for files", total=None, unit="files", alive=True) as step:
        for address in addresses:
            here = []
            for source in _expand_one(address, output):
                step(1)
                if not any(fnmatch.fnmatchcase(source.name, pattern) for pattern in exclude):
                    here.append(source)
            for source in sorted(here, key=lambda source: source.name):
                found.setdefault(source.name, source)
    if not found:
        left_out = f", or all of them match --exclude {' '.join(exclude)}" if exclude else ""
        raise UserError(f"there is no file to read in {' '.join(addresses)}{left_out}; check the paths")
    return list(found.values())


def _expand_one(address: str, output: Path | None) -> Iterator[Source]:
    scheme, separator, _ = address.partition("://")
    if separator and scheme in sources.names():
        yield Source(name=address, part=scheme, named=True)
    elif separator or "::" in address:
        yield from _remote(address)
    elif os.path.isdir(address):
        yield from _folder(address, output)
    elif os.path.exists(address):
        if not os.path.isfile(address):
            raise UserError(
                f"{address} is neither a file nor a folder and cannot be read twice; save it to a file first"
            )
        yield _local(address, named=True)
    elif glob.has_magic(address):
        count = 0
        for match in glob.iglob(address, recursive=True):
            count += 1
            if os.path.isdir(match):
                # A ** pattern names the folders that it walked through as well as what is in them.
                if "**" not in address:
                    yield from _folder(match, output)
            elif os.path.isfile(match):
                yield _local(match)
        if not count:
            raise UserError(f"nothing matches {address}; check the pattern (** spans folders)")
    else:
        raise UserError(f"{address} does not exist; check the path")


def _folder(folder: str, output: Path | None) -> Iterator[Source]:
    skipped = output.resolve() if output is not None else None
    for directory, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and Path(directory, name).resolve() != skipped
        )
        for name in sorted(names):
            path = os.path.join(directory, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield _local(path)


def _unreadable(error: OSError) -> None:
    raise UserError(f"the folder {error.filename} cannot be read: {error.strerror}; make it readable or leave it out")


def _local(path: str, named: bool = False) -> Source:
    status = os.stat(path)
    return Source(name=path, bytes=status.st_size, stamp=str(status.st_mtime_ns), named=named)


def _remote(address: str) -> Iterator[Source]:
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(address)
        if glob.has_magic(path):
            infos, named = list(system.glob(path, detail=True).values()), False
        elif (info := system.info(path))["type"] == "directory":
            infos, named = list(system.find(path, detail=True).values()), False
        else:
            infos, named = [info], True
    except ImportError as error:
        raise UserError(f"reading {address} needs a package that is not installed: {error}") from error
    except FileNotFoundError as error:
        raise UserError(f"{address} does not exist; check the address") from error
    except Exception as error:
        # Each storage library raises errors of its own; they all mean that the address cannot be read.
        raise UserError(f"{address} cannot be read: {error or type(error).__name__}") from error
    infos = sorted((info for info in infos if info["type"] == "file"), key=lambda info: info["name"])
    if not infos:
        raise UserError(f"{address} holds no file; check the address")
    _, chained, outer = address.partition("::")  # zip://*.txt::archive.zip: within what
    for info in infos:
        name = address if named else system.unstrip_protocol(info["name"]) + chained + outer
        stamp = next((info[key] for key in ("ETag", "etag", "LastModified", "mtime", "created") if info.get(key)), "")
        yield Source(name=name, bytes=info.get("size"), stamp=str(stamp), named=named)


def documents_of(source: Source) -> Iterator[Document]:
    """Return the documents of a part of another package. Raises UserError naming the part when it fails."""
    assert source.part is not None
    try:
        yield from sources.get(source.part)(source.name.partition("://")[2])
    except (UserError, GeneratorExit):
        raise
    except Exception as error:
        raise UserError(
            f"the source '{source.part}' failed at {source.name}: {type(error).__name__}: {error}"
        ) from error


def shown(name: str) -> str:
    """Return a file's name fit to print and to store: one line, and escapes for bytes that are not UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")


def to_lines(found: Iterable[Source]) -> bytes:
    """Return the sources as JSON, one line each."""
    return b"".join(json.dumps(source.model_dump()).encode() + b"\n" for source in found)


def difference(before: bytes, after: bytes) -> str | None:
    """Return in words how two lists made by `to_lines` differ, or None where they are equal."""
    if before == after:
        return None
    old, new = ({json.loads(line)["name"]: line for line in lines.splitlines()} for lines in (before, after))
    for name in new:
        if name not in old:
            return f"{name} is new"
        if old[name] != new[name]:
            return f"{name} has changed"
    for name in old:
        if name not in new:
            return f"{name} is gone"
    return "they come in another order"
