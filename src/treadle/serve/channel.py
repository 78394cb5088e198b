"""Frames of bytes between two processes over a pair of connected sockets."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

LENGTH = struct.Struct("<I")


class Channel:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._stream = end.makefile("rb")

    def send(self, frame: bytes) -> None:
        """Send a frame; waits while the other end does not read. Raises OSError where it is gone."""
        with self._sending:
            self._socket.sendall(LENGTH.pack(len(frame)) + frame)

    def receive(self) -> bytes | None:
        """Return the next frame, None once the other end is gone or this one was closed."""
        try:
            head = self._stream.read(LENGTH.size)
            if len(head) < LENGTH.size:
                return None
            size = LENGTH.unpack(head)[0]
            frame = self._stream.read(size)
        except (OSError, ValueError):
            return None
        return frame if len(frame) == size else None

    def stop_receiving(self) -> None:
        """Let `receive` return None from now on, in whichever thread it waits."""
        with contextlib.suppress(OSError):  # where the other end is gone, that does the same
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Cut the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
