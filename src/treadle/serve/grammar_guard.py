"""Grammars that could hang or crash whoever compiles them are tried in another process first.

llguidance bounds most of its work, but not all: an intersection of thirty expressions takes it hours, a chain of
thousands of rules overflows its stack. Such a grammar ends the other process, and only its own request.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from treadle.serve.request import Grammar

SECONDS = 5.0
PLAIN_CHARACTERS = 4096
PLAIN_SCHEMA_CHARACTERS = 65536
PLAIN_REFERENCES = 100
# What makes expressions meet each other.
_INTERSECTING = re.compile(r'"(?:allOf|oneOf|pattern|patternProperties|propertyNames|format|multipleOf)"')


def is_plain(grammar: Grammar) -> bool:
    """Whether a grammar can be compiled at once: it has no part whose work has no bound."""
    text = grammar.text
    if grammar.kind in ("json_object", "choice"):
        return True
    if grammar.kind == "regex":
        return len(text) <= PLAIN_CHARACTERS
    if grammar.kind == "grammar":
        return len(text) <= PLAIN_CHARACTERS and not any(sign in text for sign in "&~%")
    few_references = text.count("$ref") <= PLAIN_REFERENCES
    return len(text) <= PLAIN_SCHEMA_CHARACTERS and few_references and not _INTERSECTING.search(text)


class Guard:
    """The other process, started when it is first needed, and again when it was lost."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]) -> None:
        hexadecimal = [token.hex() for token in tokens]
        self._vocabulary = json.dumps({"tokens": hexadecimal, "special": list(special), "ends": list(ends)})
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def refusal(self, grammar: str) -> str:
        """Return why llguidance refuses a grammar or cannot cope with it, or ""."""
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps({"grammar": grammar}).encode() + b"\n")
                process.stdin.flush()
                line = _read_line(process, time.monotonic() + SECONDS)
            except OSError:
                line = b""
            if not line:
                self.close()
                return f"it takes more than {SECONDS:g} seconds or too much memory to prepare; make it simpler"
            return json.loads(line)["error"]

    def _start(self) -> subprocess.Popen[bytes]:
        script = Path(__file__).with_name("grammar_child.py")
        # Its own session: Ctrl-C is for the server, which ends this process by closing its input.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._vocabulary.encode() + b"\n")
        # The first grammar's time begins once the vocabulary is there.
        self._process.stdin.write(json.dumps({"grammar": '{"grammars": [{"lark_grammar": "start: /a/"}]}'}).encode())
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        _read_line(self._process, time.monotonic() + 60)
        return self._process

    def close(self) -> None:
        """End the other process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was not written is lost with the process
                        pipe.close()


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Return the next line, b"" where the process ends or the time is over."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return b""
        piece = process.stdout.read1(65536)  # pyrefly: ignore
        if not piece:
            return b""
        line += piece
    return line
