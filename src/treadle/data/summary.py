"""What `treadle data` prints: pleasant at 80 columns, plain where the output is no terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rich.columns import Columns
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from treadle.config.progress import amount_text
from treadle.data.corpus import Corpus
from treadle.data.prepare import PreparedReport, counted
from treadle.data.statistics import Statistics, Stretch

BAR = "▏▎▍▌▋▊▉█"
BAR_WIDTH = 30


def print_prepared(report: PreparedReport) -> None:
    """Print what was made and what to do next."""
    console, manifest = Console(highlight=False), report.manifest
    if report.reused:
        said = f"{report.folder} is there already, made from the same sources and settings"
        console.print(Text(said), soft_wrap=True)
    table = _facts()
    for name, split in manifest.splits.items():
        size = amount_text(split.bytes, "B")
        table.add_row(name, f"{split.tokens:,} tokens in {counted(split.documents, 'document')}, {size} of text")
    table.add_row("tokenizer", f"{manifest.tokenizer.vocabulary_size:,} tokens, in {report.folder}/tokenizer")
    total = sum(split.bytes for split in manifest.splits.values())
    tokens = sum(split.tokens for split in manifest.splits.values())
    table.add_row("density", f"{total / max(tokens, 1):.2f} bytes a token")
    if not report.reused and total > 1e6:
        table.add_row("speed", f"{total / 1e6 / report.seconds:.1f} MB/s of text, {report.seconds:.1f} s to tokenize")
    console.print(table)
    for note in report.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    console.print(Text(f"look at it: treadle data inspect {report.folder}", style="dim"), soft_wrap=True)


def print_inspected(corpus: Corpus, found: Statistics, verified: bool) -> None:
    """Print the statistics and samples of a split."""
    console = Console(highlight=False)
    console.print(Rule(Text(f"{corpus.folder} · {corpus.split}", style="bold"), align="left", style="dim"))
    console.print(_overview(corpus, found, verified))
    console.print()
    q = found.lengths
    console.print(Text("Tokens a document", style="bold"), end="")
    console.print(
        f": {q['shortest']:,} to {q['longest']:,}, median {q['median']:,}, four of five {q['p10']:,} to {q['p90']:,}"
    )
    console.print(_histogram(found))
    console.print()
    console.print(Text("Most frequent tokens", style="bold"))
    console.print(_frequent(found))
    for sample in found.samples:
        _print_sample(console, corpus, sample)


def _facts() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    return table


def _overview(corpus: Corpus, found: Statistics, verified: bool) -> Table:
    table = _facts()
    record = corpus.manifest.tokenizer
    table.add_row("documents", f"{found.documents:,}, {found.tokens / found.documents:,.0f} tokens each on average")
    learnt = f", {100 * found.learnt / found.tokens:.1f}% of them learnt" if corpus.has_mask else ""
    table.add_row("tokens", f"{found.tokens:,} ({corpus.manifest.dtype}){learnt}")
    table.add_row("text", f"{amount_text(found.text_bytes, 'B')}, {counted(found.words, 'word')}")
    table.add_row(
        "density", f"{found.bytes_per_token:.2f} bytes a token, {found.tokens / max(found.words, 1):.2f} tokens a word"
    )
    share = 100 * found.tokens_seen / found.vocabulary_size
    table.add_row("vocabulary", f"{found.tokens_seen:,} of {found.vocabulary_size:,} tokens occur ({share:.1f}%)")
    state = ", verified" if verified else ""
    table.add_row("on disk", f"{amount_text(found.disk_bytes, 'B')} in {counted(found.shards, 'shard')}{state}")
    ends = [name for name, index in (("BOS", record.bos_id), ("EOS", record.eos_id)) if index is not None]
    table.add_row("around each", f"{' and '.join(ends) or 'nothing'}; tokenizer {record.fingerprint[:12]}")
    if found.measured_tokens < found.tokens:
        table.add_row("", Text(f"what follows was measured on {found.measured_tokens:,} tokens of it", style="dim"))
    return table


def _histogram(found: Statistics) -> Table:
    table = Table.grid(padding=(0, 1))
    for justify in ("right", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    rows = found.histogram
    while rows and not rows[0][2]:
        rows = rows[1:]
    most = max(count for _, _, count in rows)
    for low, below, count in rows:
        table.add_row(f"{low:,}–{below - 1:,}", Text(_bar(count / most), style="green"), f"{count:,}")
    return table


def _bar(share: float) -> str:
    eighths = round(share * BAR_WIDTH * 8)
    if share > 0:
        eighths = max(eighths, 1)
    return BAR[-1] * (eighths // 8) + (BAR[eighths % 8 - 1] if eighths % 8 else "")


def _frequent(found: Statistics) -> Columns:
    items = []
    for _, token, share in found.frequent:
        text = Text(_visible(token), style="reverse", overflow="ellipsis", no_wrap=True)
        items.append(text.append(f" {100 * share:.1f}%", style="not reverse dim"))
    return Columns(items, padding=(0, 2), equal=True, column_first=True)


def _visible(token: str) -> str:
    """Return a token with its blanks shown, without places to break the line."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
    if shown.strip(" ") == "" and len(shown) > 3:
        return f"␣×{len(shown)}"
    return shown.replace(" ", "␣")


def _print_sample(console: Console, corpus: Corpus, sample: Stretch) -> None:
    tokenizer = corpus.tokenizer()
    edges = [*sample.starts, len(sample.tokens)]
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        console.print()
        title = Text(f"document {sample.document + number:,}", style="bold")
        if corpus.has_mask and not number:
            title.append("  learnt ", style="default").append("not learnt", style="dim")
        console.print(Rule(title, align="left", style="dim"))
        shown = Text()
        for tokens, learnt, special in _runs(sample, start, end, tokenizer.special_ids):
            style = ("magenta" if special else "default") + ("" if learnt else " dim")
            shown.append(tokenizer.decode(tokens, skip_special_tokens=False), style=style)
        if number == len(edges) - 2 and not _ends_document(corpus, sample, end):
            shown.append(" …", style="dim")
        console.print(shown)


def _runs(sample: Stretch, start: int, end: int, special: frozenset[int]) -> Iterator[tuple[list[int], bool, bool]]:
    """Yield (tokens, learnt, special) for each run of tokens that look the same."""
    keyed = zip(sample.tokens[start:end], sample.learnt[start:end], strict=True)
    for (learnt, is_special), group in itertools.groupby(keyed, key=lambda pair: (pair[1], pair[0] in special)):
        yield [token for token, _ in group], learnt, is_special


def _ends_document(corpus: Corpus, sample: Stretch, end: int) -> bool:
    ((start, _),) = corpus.document_spans(sample.document, sample.document + 1)
    return int(start) + end in corpus.boundaries(int(start) + end, int(start) + end)
