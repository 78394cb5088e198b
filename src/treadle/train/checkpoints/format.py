"""What a checkpoint folder is called and holds, and how to tell that it is whole."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from treadle.config import UserError
from treadle.config.files import MAX_JSON_BYTES, inside
from treadle.config.progress import Step, progress

FORMAT = 1
STATE = "training/state.json"
MANIFEST = "training/manifest.json"
_NAME = re.compile(r"step-([0-9]{8,})")
_CHUNK = 8 << 20


class DamagedCheckpoint(UserError):
    """A checkpoint is not as it was written."""


def folder_of(run: str | Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(run) / "checkpoints"


def name_of(step: int) -> str:
    """Return the name of the checkpoint after `step` steps; names sort as steps do."""
    return f"step-{step:08d}"


def steps_in(folder: str | Path) -> list[int]:
    """Return the steps of all checkpoints in a folder, whole or not, in ascending order."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def write_manifest(folder: Path, step: int) -> int:
    """Write the manifest of all files in a checkpoint that is being made; return their size in bytes together."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    sizes = {name: (folder / name).stat().st_size for name in names}
    sums = _checksums(folder, names, lambda amount=1.0, note="": None)
    files = {name: {"size": sizes[name], "sha256": sums[name]} for name in names}
    (folder / MANIFEST).write_bytes(_manifest_bytes({"format": FORMAT, "step": step, "files": files}))
    return sum(sizes.values())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest. Raises DamagedCheckpoint where it is missing or not as it was written."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise DamagedCheckpoint(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB, too large for a manifest")
        content = path.read_bytes()
        tree = json.loads(content)
        format_, step = tree["format"], tree["step"]
        body = {"format": format_, "step": step, "files": tree["files"]}
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder} is no whole checkpoint: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST} is not readable ({error})") from error
    if isinstance(format_, int) and format_ > FORMAT:
        raise UserError(f"{folder} was written by a newer Treadle (checkpoint format {format_}); update treadle")
    if _manifest_bytes(body) != content:
        raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST} is not what was written")
    return body


def verify(folder: Path, checksums: bool = True) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files are all there, of the right size and, if asked, content.

    Raises DamagedCheckpoint naming the first file that is not.
    """
    manifest = read_manifest(folder)
    try:
        _compare(folder, manifest["files"], checksums)
    except OSError as error:
        raise DamagedCheckpoint(f"{folder} is damaged: {error.filename} cannot be read ({error.strerror})") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST} does not say what it should") from error
    return manifest


def _compare(folder: Path, files: dict[str, Any], checksums: bool) -> None:
    for name, entry in files.items():
        path = inside(folder, name)
        if not path.is_file():
            raise DamagedCheckpoint(f"{folder} is damaged: {name} is missing")
        if path.stat().st_size != entry["size"]:
            raise DamagedCheckpoint(
                f"{folder} is damaged: {name} has {path.stat().st_size} bytes, {entry['size']} were written"
            )
    if checksums:
        total = sum(entry["size"] for entry in files.values())
        with progress(f"Verifying {folder.name}", total=total, unit="B") as step:
            sums = _checksums(folder, files, step)
        for name, entry in files.items():
            if sums[name] != entry["sha256"]:
                raise DamagedCheckpoint(f"{folder} is damaged: the content of {name} is not what was written")


def _manifest_bytes(body: dict[str, Any]) -> bytes:
    """Serialize a manifest in its one form, sealed with its own checksum."""
    text = json.dumps(body, indent=1, sort_keys=True)
    seal = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({**body, "seal": seal}, indent=1, sort_keys=True).encode() + b"\n"


def _checksums(folder: Path, names: Iterable[str], step: Step) -> dict[str, str]:
    """Return the SHA-256 of each file, several at once; `step` is told the bytes."""
    lock = threading.Lock()

    def checksum(name: str) -> str:
        digest = hashlib.sha256()
        try:
            with (folder / name).open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    with lock:
                        step(len(chunk))
        except OSError as error:  # an error of reading does not say of which file
            raise OSError(error.errno, error.strerror, name) from error
        return digest.hexdigest()

    names = list(names)
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(names, pool.map(checksum, names), strict=True))
