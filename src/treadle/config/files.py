"""Writing that is never seen half done, and paths that stay inside their folder."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from treadle.config.errors import TreadleError, UserError

MAX_JSON_BYTES = 64 << 20

_LEFTOVER = re.compile(r"\.(.+)\.[0-9]+(?:-[0-9a-f]{8})?\.(tmp|gone|old)")
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Libraries written in Rust (safetensors, tokenizers) hand the number on in words only.
_FULL_IN_WORDS = re.compile(r"\(os error (28|122)\)")


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write `content` beside `path`, flush it to disk, rename it into place. Raises TreadleError (disk full)."""
    with atomic_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Generator[BinaryIO]:
    """Yield a file beside `path` that takes its place, flushed to disk, when the block ends without an error.

    Several processes may do so at once: the last one wins, and readers see one whole file or another.
    Raises UserError where it may not be written, TreadleError when the disk is full.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, target)
            sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(target: str | Path, replace: bool = False) -> Generator[Path]:
    """Yield an empty folder beside `target` that becomes `target` when the block ends without an error.

    What it holds is flushed to disk before the rename. On an error, Ctrl-C included, it is removed. With `replace` a
    `target` that is there makes way at the very end; else UserError is raised where it is not empty. Raises
    TreadleError when the disk is full.

    To replace, the two folders change places in one operation of the file system. Where it has none, a kill between two
    renames leaves the old one aside, and the next `atomic_folder` or `remove_leftovers` there puts it back.
    """
    target = Path(target)
    _put_back(target)
    if not replace and os.path.exists(target) and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} already exists; choose another folder or remove it")
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with disk_errors(target):
            aside.mkdir(parents=True)
            yield aside
            sync_tree(aside)
            old = None
            if os.path.lexists(target) and not _exchange(aside, target):
                old = target.with_name(f".{target.name}.{os.getpid()}.old")
                os.rename(target, old)
            if not os.path.lexists(target):
                os.rename(aside, target)
            sync_folder(target.parent)
            if old is not None:
                _remove(old)
    finally:
        _remove(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Let two files or folders change places in one operation, and return whether the system has it (Linux has)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
    if rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):  # not on this file system
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _put_back(target: Path) -> None:
    """Put a folder back that made way for another, where a kill kept that from taking its place."""
    if os.path.lexists(target) or not target.parent.is_dir():
        return
    for path in sorted(target.parent.glob(f".{glob.escape(target.name)}.*.old")):
        if (found := _LEFTOVER.fullmatch(path.name)) and found[1] == target.name:
            os.rename(path, target)
            return


def _remove(path: Path) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def remove_folder(target: str | Path) -> None:
    """Remove a folder so that it is never seen half removed: rename it, then delete it."""
    target = Path(target)
    gone = target.with_name(f".{target.name}.{os.getpid()}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(target, gone)
    sync_folder(target.parent)
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(parent: str | Path) -> list[str]:
    """Remove what a killed process left aside in `parent` (of `atomic_folder`, `remove_folder`, `write_atomically`).

    A folder that had made way for one that did not come is put back. Only for a folder that no other process writes
    into. Returns the names that were removed.
    """
    removed = []
    for path in sorted(Path(parent).glob(".*")):
        if found := _LEFTOVER.fullmatch(path.name):
            if found[2] == "old":
                _put_back(path.with_name(found[1]))
            if os.path.lexists(path):
                removed.append(path.name)
                _remove(path)
    return removed


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder` to disk."""
    for directory, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(directory))


def sync_folder(folder: Path) -> None:
    """Flush a folder's own entries (names and renames) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(target: str | Path) -> Generator[None]:
    """Turn the operating system's errors about writing `target` into one sentence each."""
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) in _FULL or _FULL_IN_WORDS.search(str(error)):
            raise TreadleError(
                f"the disk is full: could not write {target}; free some space or choose another folder"
            ) from error
        if getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"may not write {target}: {os.strerror(getattr(error, 'errno', 0))}; choose a folder that you own"
            ) from error
        if getattr(error, "errno", None) in (
            errno.ENOTDIR,
            errno.EISDIR,
            errno.EEXIST,
            errno.ENAMETOOLONG,
            errno.ELOOP,
        ):
            raise UserError(
                f"{target} is no place to write to: {os.strerror(getattr(error, 'errno', 0))}; choose another path"
            ) from error
        raise


def inside(folder: str | Path, name: str) -> Path:
    """Return folder/name, refusing a name that leads out of it (`..`, an absolute path, a link). Raises UserError."""
    root = Path(folder).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise UserError(f"'{name}' leads out of {folder}; only files inside it are read")
    return root / name


def read_json(path: str | Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
    """Return the JSON object in `path`, or None where there is no such file. Raises UserError naming the file."""
    path = Path(path)
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > limit:
            raise UserError(f"{path} is larger than {limit >> 20} MiB, too large for what it is")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Return `content` as a JSON file that people read too."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def cache_home() -> Path:
    """Return Treadle's cache folder: $TREADLE_CACHE, or treadle/ under the user's cache folder."""
    if chosen := os.environ.get("TREADLE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "treadle"
