"""What tells one version of a model's weights from another, found without reading all of them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from treadle.config import UserError
from treadle.weights.checkpoint import Checkpoint
from treadle.weights.load import opened

HEAD_BYTES = 1 << 20
PIECES, PIECE_BYTES = 512, 4096  # of each file


def content_version(path: str | Path | Checkpoint) -> str:
    """Return a name for the weights at `path` (or that were opened) that depends on their content alone: equal for
    copies of the same files, and different after training, which changes nearly all tensors.

    A hash (BLAKE2b) over the configuration and, of each file with weights, its size, its beginning and 512 pieces
    spread evenly over it; a small file is hashed whole. Raises UserError where there is no model.
    """
    checkpoint = opened(path)
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    files = {folder / stored.file for stored in checkpoint.tensors}
    digest = hashlib.blake2b(digest_size=6)
    try:
        if checkpoint.path.is_dir():
            digest.update((folder / "config.json").read_bytes())
        for file in sorted(files):
            _add(digest, file)
    except OSError as error:
        raise UserError(f"{checkpoint.path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, file: Path) -> None:
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        if size <= HEAD_BYTES + PIECES * PIECE_BYTES:
            digest.update(opened.read())
            return
        digest.update(opened.read(HEAD_BYTES))
        for piece in range(PIECES):
            opened.seek(HEAD_BYTES + (size - HEAD_BYTES - PIECE_BYTES) * piece // (PIECES - 1))
            digest.update(opened.read(PIECE_BYTES))
