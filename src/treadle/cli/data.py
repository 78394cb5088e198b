"""`treadle data`: prepare text for training, and look at what was prepared."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from treadle.cli import verb_app

app = verb_app("Prepare text for training, and look at what was prepared.", no_args_is_help=True)


@app.command()
def prepare(
    sources: list[str] = typer.Argument(
        help="Files, folders, globs, or addresses (s3://, hf://, https:// ...): text, code, JSONL, chats, Parquet, "
        "also as .gz, .bz2, .xz, .zst."
    ),
    out: Path = typer.Option(help="The folder to make."),
    tokenizer: str | None = typer.Option(None, help="A model's folder, a GGUF file or a prepared corpus."),
    train_tokenizer: int | None = typer.Option(None, help="Train a tokenizer of so many tokens on the text."),
    validation: float = typer.Option(0.01, help="The share of the documents to hold out."),
    exclude: list[str] = typer.Option([], help="Leave out paths like this, e.g. '*/tests/*'; repeatable."),
    format: str = typer.Option("auto", help="auto (by name and content), text, jsonl or parquet."),
    text_field: str = typer.Option("text", help="The field or column that holds the text."),
    separator: str | None = typer.Option(None, help="Cut text files into documents at this text."),
    document_bytes: int | None = typer.Option(None, help="Cut text files into documents of about so many bytes."),
    invalid_utf8: str = typer.Option("replace", help="What to do with wrong bytes: replace, skip or error."),
    bad_records: str = typer.Option("error", help="What to do with records that are not as expected: error or skip."),
    bos: str = typer.Option("auto", help="BOS before each document: auto (as the tokenizer does), always or never."),
    eos: bool = typer.Option(True, help="EOS after each document."),
    shard_tokens: int = typer.Option(1 << 27, help="About how many tokens a shard holds."),
    tokenizer_bytes: int = typer.Option(64 << 20, help="About how many bytes of text to train the tokenizer on."),
    workers: int | None = typer.Option(None, help="Processes to tokenize with; one for each core by default."),
    overwrite: bool = typer.Option(False, help="Make it again where it was made from something else, or is damaged."),
    as_json: bool = typer.Option(False, "--json", help="Print what was made as JSON."),
) -> None:
    """Turn text into token shards; interrupted, the same command goes on where it stopped."""
    from treadle.config import parse_settings
    from treadle.data import prepare as preparing

    given = {key: value for key, value in locals().items() if key in preparing.PrepareSettings.model_fields}
    report = preparing.prepare(parse_settings(preparing.PrepareSettings, given, source="treadle data prepare"))
    if as_json:
        print(json.dumps(report.model_dump(mode="json"), indent=1))
    else:
        from treadle.data.summary import print_prepared

        print_prepared(report)


@app.command()
def inspect(
    folder: Path = typer.Argument(help="A prepared corpus."),
    split: str = typer.Option("train", help="train or validation."),
    samples: int = typer.Option(3, help="How many samples to show.", min=0),
    tokens: int = typer.Option(160, help="How many tokens of each sample to show.", min=1),
    seed: int = typer.Option(0, help="Which samples."),
    verify: bool = typer.Option(False, help="Read everything and compare checksums."),
    as_json: bool = typer.Option(False, "--json", help="Print statistics and samples as JSON."),
) -> None:
    """Show statistics and samples of a prepared corpus."""
    from treadle.data.corpus import Corpus
    from treadle.data.statistics import measure
    from treadle.data.summary import print_inspected

    corpus = Corpus.open(folder, split)
    if verify:
        corpus.verify()
    found = measure(corpus, samples=samples, sample_tokens=tokens, seed=seed)
    if as_json:
        print(json.dumps(found.to_json(), indent=1, ensure_ascii=False))
    else:
        print_inspected(corpus, found, verified=verify)
