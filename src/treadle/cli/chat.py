"""`treadle chat`: talk with a model in the terminal, or through a pipe (a line is a message)."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

import typer

from treadle.cli import verb_app
from treadle.config import UserError
from treadle.config.errors import nearest

if TYPE_CHECKING:
    from treadle.serve.conversation import Conversation

app = verb_app(
    "Talk with a model in the terminal. /help lists what can be typed; Ctrl-C stops an answer, Ctrl-D leaves."
)

COMMANDS = {
    "/help": "what can be typed",
    "/reset": "begin again; the system message stays",
    "/system TEXT": "begin again with this system message (without TEXT: with none)",
    "/save FILE": "write the conversation as a line of JSON",
    "/exit": "leave, as Ctrl-D does",
}
HELP = "\n".join(
    [
        *(f"  {name:<13} {what}" for name, what in COMMANDS.items()),
        "  Ctrl-C stops an answer. A line that ends with \\ goes on in the next one; // begins a message with a slash.",
    ]
)


@app.command()
def chat(
    model: str = typer.Argument(help="A Hugging Face directory, a checkpoint or a GGUF file, tuned for chats."),
    system: str = typer.Option(None, help="The system message."),
    max_tokens: int = typer.Option(1024, min=1, help="The most tokens of an answer."),
    temperature: float = typer.Option(0.7, min=0, help="0 always takes the likeliest token."),
    top_p: float = typer.Option(0.95, help="Draw from the likeliest tokens that have this share together."),
    top_k: int = typer.Option(0, help="Draw from this many likeliest tokens (0: all)."),
    min_p: float = typer.Option(0.0, help="Draw from tokens at least this much as likely as the likeliest."),
    repetition_penalty: float = typer.Option(1.0, help="Above 1 makes tokens that were there less likely."),
    seed: int = typer.Option(None, help="The same seed and the same messages give the same answers."),
    max_model_len: int = typer.Option(None, min=1, help="Tokens of the longest conversation (default: the model's)."),
    dtype: str = typer.Option("auto", help="auto (the checkpoint's), float32, bfloat16 or float16."),
    device: str = typer.Option(None, help="cpu, cuda, ... (default: the accelerator, where there is one)."),
    verbose: bool = typer.Option(False, "--verbose", help="Show tokens and speed below each answer."),
) -> None:
    from treadle.serve.request import SamplingSettings

    settings = SamplingSettings.of(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    from treadle.serve.conversation import Conversation, check_chat_template
    from treadle.serve.engine import Engine
    from treadle.serve.model import load

    loaded = load(model, dtype, device, check_tokenizer=check_chat_template)
    with Engine(loaded, max_num_seqs=1, max_model_len=max_model_len) as engine:
        screen = Screen(verbose)
        conversation = Conversation(engine, settings, system)
        screen.note(f"{loaded}. /help lists what can be typed, Ctrl-D leaves.")
        while (line := screen.read()) is not None:
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if not command(conversation, line, screen):
                        break
                elif line.strip():
                    answer(conversation, line.removeprefix("/") if line.startswith("//") else line, screen)
            except UserError as error:
                if not screen.interactive:
                    raise
                screen.note(str(error))


def command(conversation: Conversation, line: str, screen: Screen) -> bool:
    """Carry out a line that begins with a slash; returns False to leave. Raises UserError."""
    name, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if name in ("/exit", "/quit"):
        return False
    if name == "/help":
        screen.note(HELP)
    elif name == "/reset":
        conversation.reset(conversation.system)
        screen.note("The conversation begins again.")
    elif name == "/system":
        conversation.reset(rest or None)
        screen.note("The conversation begins again, " + ("with" if rest else "without") + " a system message.")
    elif name == "/save":
        if not rest:
            raise UserError("/save needs the name of a file")
        conversation.save(rest)
        screen.note(f"Saved {len(conversation.messages)} messages to {rest}.")
    else:
        known = [known.split()[0] for known in COMMANDS]
        raise UserError(f"unknown command '{name}'{nearest(name, known) or '; /help lists them'}")
    return True


def answer(conversation: Conversation, text: str, screen: Screen) -> None:
    """Print the answer to a message as it comes; Ctrl-C ends it."""
    forgotten = conversation.forgotten
    deltas = conversation.ask(text)
    started, first, count = time.monotonic(), 0.0, 0
    try:
        with contextlib.closing(deltas), screen.answering() as show:  # pyrefly: ignore
            for delta in deltas:
                first = first or time.monotonic()
                count += len(delta.tokens)
                show(delta.text)
    except KeyboardInterrupt:
        screen.note("(stopped)")
    if conversation.forgotten > forgotten:
        screen.note(f"(the oldest {conversation.forgotten} messages no longer fit the context and were left out)")
    if screen.verbose and count:
        speed = (count - 1) / max(time.monotonic() - first, 1e-9)
        screen.note(f"({count} tokens, the first after {first - started:.2f} s, then {speed:.0f} a second)")


class Screen:
    """The terminal, or a pipe: then nothing but answers goes to standard output."""

    def __init__(self, verbose: bool) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.verbose = verbose
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() editing and history

    def read(self) -> str | None:
        """Return what was typed, or None at the end of the input. Raises UserError for what is not text."""
        lines = []
        while True:
            try:
                # \\001 and \\002 tell readline which characters take no room.
                line = input(("\001\033[1m\002> \001\033[0m\002" if not lines else ". ") if self.interactive else "")
            except EOFError:
                if self.interactive:
                    print()
                return "\n".join(lines) if lines else None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                print("\n(Ctrl-D leaves)")
                lines = []
                continue
            except UnicodeDecodeError as error:
                raise UserError(f"the input is not valid UTF-8: {error}") from error
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    def note(self, text: str) -> None:
        """Say something that is not the model's; through a pipe only when asked to be verbose."""
        if self.interactive:
            print(f"\033[2m{text}\033[0m", flush=True)
        elif self.verbose:
            print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def answering(self):
        """Yield a function that shows pieces of an answer; until the first one a terminal shows that it is coming."""
        waiting = self.interactive
        if waiting:
            print("\033[2m...\033[0m", end="", flush=True)

        def show(text: str) -> None:
            nonlocal waiting
            if waiting and text:
                print("\r\033[K", end="")
                waiting = False
            print(text, end="", flush=True)

        try:
            yield show
        finally:
            if waiting:
                print("\r\033[K", end="")
            print(flush=True)
