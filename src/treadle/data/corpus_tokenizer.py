"""The tokenizer of a corpus: given or trained on it, what it puts around documents, where it bears a cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.config import UserError
from treadle.config.files import atomic_folder
from treadle.config.progress import progress
from treadle.data.documents import TokenizeSettings, texts_of
from treadle.data.reading import ReadSettings, SafeCut, read_blocks
from treadle.data.shards import MANIFEST
from treadle.data.sources import Source

if TYPE_CHECKING:
    from treadle.model.tokenizer import Tokenizer


def given_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a model's folder, of a prepared corpus, of a GGUF file, or of a tokenizer.json."""
    from treadle.model.tokenizer import Tokenizer

    place = Path(path)
    if place.is_file() and place.suffix == ".gguf":
        from treadle.weights.gguf import GgufFile
        from treadle.weights.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(GgufFile.open(place))
    if place.is_file() and place.name == "tokenizer.json":
        place = place.parent
    if (place / MANIFEST).is_file() and (place / "tokenizer").is_dir():
        place = place / "tokenizer"
    return Tokenizer.load(place)


def corpus_tokenizer(folder: Path, given: Tokenizer | None, train: Callable[[], Tokenizer]) -> Tokenizer:
    """Return the tokenizer, which then lies in `folder` beside the shards: the given one, or one trained here."""
    from treadle.model.tokenizer import Tokenizer

    place = folder / "tokenizer"
    if not place.is_dir():
        tokenizer = train() if given is None else given
        with atomic_folder(place) as aside:
            tokenizer.save(aside)
    return Tokenizer.load(place)


def sampled_texts(found: list[Source], read: ReadSettings, work: TokenizeSettings, limit: int) -> Iterator[str]:
    """Yield at most about `limit` bytes of the training documents, evenly from all sources, the same ones every time.

    Every n-th block is kept, and n doubles whenever that has become too much: one pass, in memory of that size.
    """
    kept: list[list[str]] = []
    every, number, size = 1, 0, 0
    total = sum(source.bytes or 0 for source in found)
    with progress("Reading text for the tokenizer", total=total or None, unit="B") as step:
        position = 0
        for block in read_blocks(found, read):
            step(block.position - position)
            position = block.position
            texts = [text for split, text in texts_of(block.pieces, work) if split == "train"]
            if not texts:
                continue
            if number % every == 0:
                kept.append(texts)
                size += sum(map(len, texts))
            number += 1
            while size > limit and len(kept) > 1:
                kept, every = kept[::2], 2 * every
                size = sum(len(text) for texts in kept for text in texts)
    for texts in kept:
        yield from texts


def ends(tokenizer: Tokenizer, bos: str, eos: bool) -> tuple[int | None, int | None]:
    """Return the ids to put before and after each document."""
    bos_id = tokenizer.bos_id
    if bos == "always" and bos_id is None:
        raise UserError("--bos always: the tokenizer has no BOS token; leave the option out")
    if bos == "never" or (bos == "auto" and tokenizer.encode("")[:1] != [bos_id]):
        bos_id = None
    return bos_id, tokenizer.eos_ids[0] if eos and tokenizer.eos_ids else None


def safe_cut_of(tokenizer: Tokenizer) -> SafeCut:
    """Return the function that says whether cutting a text between two neighbouring parts leaves its tokens alone."""

    def safe(left: str, right: str) -> bool:
        whole, first, second = tokenizer.encode_batch(
            [left + right, left, right], special_tokens=False, parse_special=False
        )
        return whole == first + second

    return safe
