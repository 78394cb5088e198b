"""`treadle generate`: complete a prompt, word by word."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from treadle.cli import verb_app
from treadle.config import UserError

if TYPE_CHECKING:
    from treadle.serve.engine import Engine
    from treadle.serve.request import SamplingSettings

app = verb_app("Complete a prompt. The text is continued as it is; --chat asks the model as a user would.")

DEFAULT_TOKENS = 256


@app.command()
def generate(
    model: str = typer.Argument(help="A Hugging Face directory, a checkpoint or a GGUF file."),
    prompt: str = typer.Argument("-", help="The prompt; '-' or nothing reads it from standard input."),
    max_tokens: int = typer.Option(None, min=1, help="The most tokens to make (default: 256, if they fit)."),
    temperature: float = typer.Option(0.7, min=0, help="0 always takes the likeliest token."),
    top_p: float = typer.Option(1.0, help="Draw from the likeliest tokens that have this share together."),
    top_k: int = typer.Option(0, help="Draw from this many likeliest tokens (0: all)."),
    min_p: float = typer.Option(0.0, help="Draw from tokens at least this much as likely as the likeliest."),
    repetition_penalty: float = typer.Option(1.0, help="Above 1 makes tokens that were there less likely."),
    stop: list[str] = typer.Option([], help="End before this text; repeat it for more."),
    seed: int = typer.Option(None, help="The same seed gives the same text."),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on after the model's end token."),
    chat: bool = typer.Option(False, "--chat/--raw", help="Put the prompt through the model's chat template."),
    system: str = typer.Option(None, help="The system message, with --chat."),
    dtype: str = typer.Option("auto", help="auto (the checkpoint's), float32, bfloat16 or float16."),
    device: str = typer.Option(None, help="cpu, cuda, ... (default: the accelerator, where there is one)."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object at the end instead of the text."),
) -> None:
    from treadle.serve.request import SamplingSettings

    settings = SamplingSettings.of(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    if system is not None and not chat:
        raise UserError("--system needs --chat: a text that is continued as it is has no system message")
    text = read_prompt(prompt)
    started = time.monotonic()
    from treadle.model.chat import encode_chat
    from treadle.serve.conversation import check_chat_template
    from treadle.serve.engine import Engine
    from treadle.serve.model import load

    loaded = load(model, dtype, device, check_tokenizer=check_chat_template if chat else None)
    if chat:
        assert loaded.tokenizer is not None
        messages = [] if system is None else [{"role": "system", "content": system}]
        tokens = encode_chat(loaded.tokenizer, [*messages, {"role": "user", "content": text}])
    else:
        tokens = loaded.encode(text)
    if max_tokens is None:
        limit = max(1, min(DEFAULT_TOKENS, loaded.spec.max_positions - len(tokens)))
        settings = SamplingSettings.of(settings, max_tokens=limit)
    with Engine(loaded, max_num_seqs=1, max_model_len=loaded.room_for(tokens, settings.max_tokens)) as engine:
        result = run(engine, tokens, settings, quiet=as_json)
    if as_json:
        result["seconds"] = round(time.monotonic() - started, 3)
        print(json.dumps(result, ensure_ascii=False))


def read_prompt(prompt: str) -> str:
    """Return the prompt, from standard input where it is '-'. Raises UserError for bytes that are no text."""
    if prompt != "-":
        return prompt
    if sys.stdin.isatty():
        print("Type the prompt, then Ctrl-D.", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt on standard input is not valid UTF-8: {error}") from error


def run(engine: Engine, tokens: list[int], settings: SamplingSettings, quiet: bool) -> dict[str, Any]:
    """Print the answer as it comes, unless `quiet`; return it with its numbers."""
    from treadle.serve.request import Completion

    completion = Completion()
    started = first = last = time.monotonic()
    at_once = 0  # tokens of the first delta: they say nothing about the time that a token takes
    try:
        for delta in engine.deltas(tokens, settings):
            last = time.monotonic()
            if not completion.tokens:
                first, at_once = last, len(delta.tokens)
            completion.add(delta)
            if not quiet:
                print(delta.text, end="", flush=True)
    finally:
        if not quiet and completion.tokens:
            print(flush=True)
    made = len(completion.tokens)
    timed = made > at_once and last > first
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": made,
        "first_token_seconds": round(first - started, 4),
        "tokens_per_second": round((made - at_once) / (last - first), 2) if timed else None,
    }
