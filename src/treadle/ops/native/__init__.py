"""The native library: plain C++ behind a C ABI, loaded with ctypes; several instruction sets, chosen at run time.

    if not native.missing():
        native.library().treadle_rms_norm(arguments, rows, threads)

`TREADLE_ISA` (or `select`) names a variant to use instead of the widest one that this processor can run.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from treadle.config.errors import UserError, nearest

ABI = 6
NAME = "treadle_native.so"


def _files() -> list[Path]:
    return [path for folder in __path__ if (path := Path(folder) / NAME).is_file()]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """Return the library and "", or None and the reason why there is none."""
    found = _files()
    if not found:
        return None, "the library was not built: no C++20 compiler was found when Treadle was installed"
    # An editable installation has one beside the sources too, where `make native` has built it since.
    newest = max(found, key=lambda path: path.stat().st_mtime)
    try:
        library = ctypes.CDLL(str(newest))
        library.treadle_abi.restype = ctypes.c_int32
        abi = library.treadle_abi()
    except (OSError, AttributeError) as error:
        return None, f"{newest} does not load: {error}"
    if abi != ABI:
        return None, f"{newest} is of another version of Treadle (ABI {abi}, not {ABI}); install Treadle again"
    library.treadle_variant.restype = ctypes.c_char_p
    library.treadle_runnable.restype = ctypes.c_char_p
    library.treadle_runnable.argtypes = [ctypes.c_int32]
    library.treadle_select.restype = ctypes.c_int32
    library.treadle_select.argtypes = [ctypes.c_char_p]
    if wanted := os.environ.get("TREADLE_ISA"):
        _select(library, wanted)
    return library, ""


def missing() -> str:
    """Return "" where the library is loaded, else the reason why it is not."""
    return _load()[1]


def broken() -> bool:
    """Return whether a library was installed that cannot be used (rather than none at all)."""
    return bool(missing()) and bool(_files())


def library() -> ctypes.CDLL:
    """Return the loaded library; only where `missing()` is ""."""
    loaded = _load()[0]
    assert loaded is not None
    return loaded


def variant() -> str:
    """Return the name of the variant in use, "" without a library."""
    loaded = _load()[0]
    return loaded.treadle_variant().decode() if loaded else ""


def runnable() -> list[str]:
    """Return the variants that this processor can run, the widest first."""
    loaded = _load()[0]
    return _runnable(loaded) if loaded else []


def select(name: str) -> None:
    """Use the variant `name` from now on. Raises UserError where this processor cannot run it."""
    _select(library(), name)


def _runnable(loaded: ctypes.CDLL) -> list[str]:
    names: list[str] = []
    while (name := loaded.treadle_runnable(len(names))) is not None:
        names.append(name.decode())
    return names


def _select(loaded: ctypes.CDLL, name: str) -> None:
    if loaded.treadle_select(name.encode()) != 0:
        known = _runnable(loaded)
        raise UserError(
            f"no native variant '{name}' runs here{nearest(name, known) or '; this processor runs ' + ', '.join(known)}"
        )
