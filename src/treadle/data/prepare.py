"""From sources to a prepared corpus: tokenize in parallel, write in order, go on after an interruption.

    report = prepare(PrepareSettings(sources=["texts/"], out="corpus", train_tokenizer=8192))

While it runs, everything lies in `.preparing/` within the folder, with a journal: up to which place in the sources all
is durable on disk, and how long the shards were then. A second run cuts the shards back to that and goes on from that
place. A corpus that is to be replaced stays whole until the new one is complete. The output depends on the sources and
the settings alone, however many processes worked and however often they were killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from treadle.config import Settings, TreadleError, UserError
from treadle.config.files import write_atomically
from treadle.config.progress import amount_text, progress
from treadle.data.corpus_tokenizer import corpus_tokenizer, ends, given_tokenizer, safe_cut_of, sampled_texts
from treadle.data.documents import NAMES_KEPT, Counts, TokenizeSettings, digests_of, threshold
from treadle.data.journal import (
    JOURNAL,
    Journal,
    begin,
    changed_since,
    damaged,
    discard,
    install,
    locked,
    refuse_foreign,
    sync,
    tidy,
)
from treadle.data.pool import tokenize_blocks
from treadle.data.reading import Block, ReadSettings, read_blocks
from treadle.data.shards import (
    MANIFEST,
    PREPARING,
    SPLITS,
    Manifest,
    SplitRecord,
    TokenizerRecord,
    read_manifest,
    token_dtype,
)
from treadle.data.sources import Source, expand, shown
from treadle.data.writer import SplitWriter
from treadle.device.host import cores

if TYPE_CHECKING:
    from treadle.model.tokenizer import Tokenizer

SYNC_SECONDS = 2.0
IN_PROCESS_BYTES = 1 << 20
POLICIES = ("invalid_utf8", "bad_records")
# Settings that leave the tokens as they are, or are known by what they lead to.
NOT_DECISIVE = {"sources", "exclude", "out", "workers", "overwrite", "tokenizer"}


class PrepareSettings(Settings):
    """What `prepare` makes of what."""

    sources: list[str] = Field(min_length=1)
    out: Path
    tokenizer: str | None = None
    train_tokenizer: int | None = Field(None, ge=1)
    tokenizer_bytes: int = Field(64 << 20, ge=1 << 10)
    validation: float = Field(0.01, ge=0, lt=1)
    exclude: list[str] = []
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    text_field: str = "text"
    separator: str | None = Field(None, min_length=1)
    document_bytes: int | None = Field(None, ge=1 << 10, le=16 << 20)
    invalid_utf8: Literal["replace", "skip", "error"] = "replace"
    bad_records: Literal["error", "skip"] = "error"
    bos: Literal["auto", "always", "never"] = "auto"
    eos: bool = True
    shard_tokens: int = Field(1 << 27, ge=1)
    workers: int | None = Field(None, ge=0, le=1024)
    overwrite: bool = False

    @model_validator(mode="after")
    def _one_tokenizer(self) -> PrepareSettings:
        if (self.tokenizer is None) == (self.train_tokenizer is None):
            raise ValueError("choose one of --tokenizer (a model's folder) and --train-tokenizer (a vocabulary size)")
        if self.separator and self.document_bytes:
            raise ValueError("choose one of --separator and --document-bytes")
        return self


class PreparedReport(Settings):
    """What was made. `seconds` is the time of all the runs that it took; `reused` says that it was there already."""

    folder: Path
    manifest: Manifest
    seconds: float
    reused: bool
    notes: list[str]


def prepare(settings: PrepareSettings) -> PreparedReport:
    """Make a corpus, or go on making it, or find that it is there already; see the head of this file.

    Raises UserError for what the user can mend (the sentence says how), TreadleError for a full disk or a lost
    process.
    """
    out = settings.out
    found = expand(settings.sources, settings.exclude, out)
    refuse_foreign(out)
    given = given_tokenizer(settings.tokenizer) if settings.tokenizer else None
    if settings.train_tokenizer is not None:
        from treadle.model.tokenizer_train import check_vocabulary_size

        check_vocabulary_size(settings.train_tokenizer, name="--train-tokenizer")
    decisive = _decisive(settings, given)
    if (out / PREPARING / MANIFEST).is_file():
        with locked(out):
            install(out)  # a process was killed when all but this was done
    if (out / MANIFEST).is_file():
        manifest = read_manifest(out)
        changed = changed_since(out, manifest.settings, decisive, found, whole=True) or damaged(
            out, manifest, thoroughly=settings.overwrite
        )
        if changed is None:
            return _report(out, manifest, 0.0, reused=True, beside=tidy(out, decisive))
        if not settings.overwrite:
            raise UserError(f"{out} is there, but {changed}; add --overwrite to make it again")
    created = not out.exists()
    with locked(out):
        journal = begin(out, decisive, found, settings.overwrite)
        try:
            manifest, seconds = _run(settings, given, found, journal)
        except BaseException as error:
            # What took long is kept for the next run: what the journal tells of, and a tokenizer trained here.
            work = out / PREPARING
            trained = settings.train_tokenizer is not None and (work / "tokenizer").is_dir()
            # And a corpus that is complete, of which a part may have its place already.
            complete = (work / MANIFEST).is_file()
            kept = complete or (out / JOURNAL).is_file() or (trained and not isinstance(error, UserError))
            if not kept:
                discard(out, folder_too=created)
            if isinstance(error, TreadleError) and kept:
                way_out = "what was done is kept, and the same command goes on from there"
                raise type(error)(f"{error} ({way_out})") from error
            raise
    return _report(out, manifest, seconds, reused=False)


def _decisive(settings: PrepareSettings, given: Tokenizer | None) -> dict[str, Any]:
    """Return the settings that decide the tokens, as plain data."""
    chosen = settings.model_dump(mode="json", exclude=NOT_DECISIVE)
    return chosen | {"tokenizer": given.fingerprint if given else None}


def _run(
    settings: PrepareSettings, given: Tokenizer | None, found: list[Source], journal: Journal
) -> tuple[Manifest, float]:
    work_folder = settings.out / PREPARING
    read = ReadSettings(**{key: getattr(settings, key) for key in ReadSettings.model_fields})
    work = TokenizeSettings(**{key: getattr(settings, key) for key in ("text_field", "validation", *POLICIES)})
    if journal.validation is None:
        digests = _digests(found, read, work)
        journal = journal.model_copy(update={"validation": threshold(settings.validation, digests)})
    work = work.model_copy(update={"validation": journal.validation})

    def train() -> Tokenizer:
        from treadle.model.tokenizer import Tokenizer

        assert settings.train_tokenizer is not None
        return Tokenizer.train(sampled_texts(found, read, work, settings.tokenizer_bytes), settings.train_tokenizer)

    tokenizer = corpus_tokenizer(work_folder, given, train)
    bos_id, eos_id = ends(tokenizer, settings.bos, settings.eos)
    dtype = token_dtype(tokenizer.vocabulary_size)
    writers = {
        split: SplitWriter(work_folder, split, dtype, settings.shard_tokens, journal.splits.get(split))
        for split in SPLITS
    }
    work = work.model_copy(update={"bos_id": bos_id, "eos_id": eos_id})
    try:
        journal = _tokenize(settings, found, journal, writers, read, work, tokenizer)
        if not any(writer.tokens or writer.closed for writer in writers.values()):
            (settings.out / JOURNAL).unlink(missing_ok=True)
            raise _empty(settings, found, journal)
        records = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()
    if not records["train"].tokens:
        (settings.out / JOURNAL).unlink(missing_ok=True)
        raise UserError(
            f"every document fell to validation, none is left to train on; lower --validation (now "
            f"{settings.validation})"
        )
    return _finish(settings, found, journal, records, tokenizer, bos_id, eos_id), journal.seconds


def _digests(found: list[Source], read: ReadSettings, work: TokenizeSettings) -> Iterator[bytes]:
    total = sum(source.bytes or 0 for source in found)
    with progress("Choosing what to hold out", total=total or None, unit="B") as step:
        position = 0
        for block in read_blocks(found, read):
            yield from digests_of(block.pieces, work)
            step(block.position - position)
            position = block.position


def _tokenize(
    settings: PrepareSettings,
    found: list[Source],
    journal: Journal,
    writers: dict[str, SplitWriter],
    read: ReadSettings,
    work: TokenizeSettings,
    tokenizer: Tokenizer,
) -> Journal:
    """Write every document from the journal's place on, and keep the journal. Returns its last state."""
    sizes = [source.bytes for source in found]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    blocks = read_blocks(found, read, journal.cursor, safe_cut_of(tokenizer))
    tokenized = tokenize_blocks(blocks, settings.out / PREPARING / "tokenizer", work, _workers(settings, total))
    synced = started = time.monotonic()
    before, at = journal.seconds, journal.position
    settled = False  # the journal's place and what the writers hold belong together, and are not saved yet
    tokens = sum(state.tokens + sum(s.tokens for s in state.closed) for state in journal.splits.values())
    with progress(f"Preparing {settings.out}", total=total, unit="B") as step, contextlib.closing(tokenized):
        step(at)
        try:
            for block, result in tokenized:
                settled = False
                for split, documents in result.splits.items():
                    writers[split].add(documents)
                    tokens += len(documents.tokens)
                journal = _advanced(journal, block, result.counts, before + time.monotonic() - started)
                settled = True
                if time.monotonic() - synced > SYNC_SECONDS:
                    sync(settings.out, journal, writers)
                    synced, settled = time.monotonic(), False
                step(block.position - at, amount_text(tokens, "tokens"))
                at = block.position
        except KeyboardInterrupt:
            if settled:
                sync(settings.out, journal, writers)
            raise
    return journal


def _advanced(journal: Journal, block: Block, counts: Counts, seconds: float) -> Journal:
    return journal.model_copy(
        update={
            "cursor": block.cursor,
            "position": block.position,
            "counts": journal.counts.plus(counts),
            "skipped": journal.skipped + len(block.skipped),
            "skipped_names": [*journal.skipped_names, *block.skipped][:NAMES_KEPT],
            "seconds": seconds,
        }
    )


def _workers(settings: PrepareSettings, total: int | None) -> int:
    if settings.workers is not None:
        return settings.workers
    if total is not None and total <= IN_PROCESS_BYTES:
        return 0
    return cores() if total is None else min(cores(), math.ceil(total / IN_PROCESS_BYTES))


def _empty(settings: PrepareSettings, found: list[Source], journal: Journal) -> UserError:
    reasons = []
    if journal.skipped:
        reasons.append(f"{counted(journal.skipped, 'binary file')} skipped, such as {journal.skipped_names[0]}")
    if journal.counts.empty:
        reasons.append(counted(journal.counts.empty, "empty document"))
    if journal.counts.invalid_utf8 and settings.invalid_utf8 == "skip":
        reasons.append(f"{journal.counts.invalid_utf8} not valid UTF-8")
    if journal.counts.bad_records:
        reasons.append(counted(journal.counts.bad_records, "bad record"))
    why = f" ({'; '.join(reasons)})" if reasons else ""
    where = f"{counted(len(found), 'file')} of {' '.join(settings.sources)}"
    return UserError(f"there is no text in the {where}{why}; check the paths")


def _finish(
    settings: PrepareSettings,
    found: list[Source],
    journal: Journal,
    records: dict[str, SplitRecord],
    tokenizer: Tokenizer,
    bos_id: int | None,
    eos_id: int | None,
) -> Manifest:
    out, counts = settings.out, journal.counts
    given = _decisive(settings, tokenizer if settings.tokenizer else None)
    manifest = Manifest(
        dtype=token_dtype(tokenizer.vocabulary_size),
        tokenizer=TokenizerRecord(
            fingerprint=tokenizer.fingerprint,
            vocabulary_size=tokenizer.vocabulary_size,
            bos_id=bos_id,
            eos_id=eos_id,
        ),
        splits=records,
        settings=given,
        sources={
            "files": len(found),
            "bytes": sum(source.bytes or 0 for source in found),
            "given": [shown(source) for source in settings.sources],
        },
        report={
            "held_out_share": journal.validation,
            "binary_files": journal.skipped,
            **counts.model_dump(exclude={"names"}),
            "names": counts.names | ({"binary_files": journal.skipped_names} if journal.skipped else {}),
        },
    )
    # The manifest is what makes it a corpus: it comes last.
    write_atomically(out / PREPARING / MANIFEST, json.dumps(manifest.model_dump(mode="json"), indent=1).encode())
    install(out)
    return manifest


def counted(number: int, noun: str) -> str:
    """Return "1 file", "2 files"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _report(folder: Path, manifest: Manifest, seconds: float, reused: bool, beside: str = "") -> PreparedReport:
    met = Counts.model_validate({key: manifest.report.get(key, 0) for key in Counts.model_fields if key != "names"})
    names: Any = manifest.report.get("names") or {}
    binary: Any = manifest.report.get("binary_files") or 0

    def such(kind: str) -> str:
        return f", such as {names[kind][0]}" if names.get(kind) else ""

    policy = manifest.settings.get("invalid_utf8")
    done = "skipped" if policy == "skip" else "with U+FFFD in place of the wrong bytes"
    notes = [
        (
            binary,
            f"{counted(binary, 'file')} skipped as binary or not in UTF-8{such('binary_files')}",
        ),
        (met.invalid_utf8, f"{counted(met.invalid_utf8, 'document')} not valid UTF-8, {done}{such('invalid_utf8')}"),
        (met.bad_records, f"{counted(met.bad_records, 'bad record')} skipped{such('bad_records')}"),
        (met.empty, f"{counted(met.empty, 'empty document')} left out{such('empty')}"),
        (met.forced_cuts, f"{counted(met.forced_cuts, 'cut')} in long documents may show{such('forced_cuts')}"),
        (
            manifest.settings.get("validation") != manifest.report.get("held_out_share"),
            "by chance no document fell to validation, so the one with the smallest hash was held out",
        ),
        (
            manifest.settings.get("validation") and not manifest.splits["validation"].documents,
            "one document cannot be divided, so none is held out: cut it into many with --document-bytes 65536",
        ),
        (manifest.tokenizer.eos_id is None, "the tokenizer has no EOS token, so documents end without one"),
        (beside, beside),
    ]
    return PreparedReport(
        folder=folder, manifest=manifest, seconds=seconds, reused=reused, notes=[text for count, text in notes if count]
    )
