"""`treadle serve` as a process of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Generator


class Process:
    """A running `treadle serve`."""

    def __init__(self, *words: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "treadle", "serve", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.lines: list[str] = []

    def ready(self) -> str:
        """Return the address once it serves."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.lines.append(line)
            if found := re.search(r"Serving .* at (http://\S+)", line):
                return found[1]
        raise AssertionError("".join(self.lines) + self.end()[1])

    def end(self) -> tuple[int, str]:
        """Return the exit code and what was said on standard error."""
        out, err = self.child.communicate(timeout=120)
        self.lines += out.splitlines(keepends=True)
        return self.child.returncode, err


@contextlib.contextmanager
def serving(*words: str) -> Generator[tuple[Process, str]]:
    process = Process(*words)
    try:
        yield process, process.ready()
    finally:
        process.child.kill()
        process.child.wait()
