"""The command line: one file a verb, imported only when that verb is asked for."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

# verb -> what `treadle --help` says of it; the verb lives in treadle/cli/<verb>.py as `app`
VERBS = {
    "quickstart": "The whole journey on real data: prepare, train, evaluate, serve, ask.",
    "doctor": "Show what this machine can do and what Treadle will use.",
    "data": "Prepare text for training, and look at what was prepared.",
    "train": "Train or fine-tune a model from a YAML file.",
    "eval": "Measure a model's loss and perplexity on held-out text.",
    "generate": "Complete a prompt.",
    "chat": "Talk with a model in the terminal.",
    "serve": "Serve a model over HTTP (OpenAI's API).",
    "convert": "Write a model (a GGUF file, a checkpoint) as a Hugging Face directory.",
    "ops": "List the operators and which kernel each one runs here, and why.",
}


# What asks for tracebacks; processes that are started inherit it.
DEBUG = "TREADLE_DEBUG"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: errors become one sentence on stderr, exit code 2 for the user's mistakes, else 1."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    before = os.environ.get(DEBUG)
    while words[:1] == ["--debug"]:
        _debug(bool(words.pop(0)))
    try:
        if words and words[0] in VERBS:
            module = importlib.import_module(f"treadle.cli.{words[0]}")
            code = module.app(args=words[1:], prog_name=f"treadle {words[0]}", standalone_mode=False)
        else:
            code = _verbs()(args=words, prog_name="treadle", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:
        # The reader (head, less) has gone: what it did not read is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        code = report(error)
    finally:
        if before is None:
            os.environ.pop(DEBUG, None)
    sys.exit(code or 0)


class _Verb(typer.Typer):
    """Typer's application; every command of it has --debug, and option names may be written with underscores."""

    def command(self, *given: Any, **options: Any) -> Any:
        register = super().command(*given, **options)

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            register(_with_debug(function))
            return function

        return add


def _with_debug(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with the option --debug, as Typer reads it off a signature; `function` itself never sees it."""

    @functools.wraps(function)
    def wrapped(debug: bool = False, **named: Any) -> Any:
        return function(**named)

    option = typer.Option(
        False, "--debug", help="Show the traceback of an error.", callback=_debug, is_eager=True, expose_value=False
    )
    parameters = inspect.signature(function).parameters.values()
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=option, annotation=bool)
    wrapped.__signature__ = inspect.Signature([*parameters, debug])  # pyrefly: ignore[missing-attribute]
    wrapped.__annotations__ = {**function.__annotations__, "debug": bool}
    return wrapped


def _debug(wanted: bool) -> None:
    """Ask for tracebacks, here and in the processes that are started."""
    if wanted:
        os.environ[DEBUG] = "1"


def verb_app(help_text: str, **options: Any) -> typer.Typer:
    """Return the Typer application that a verb's file names `app`."""
    return _Verb(
        help=help_text,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _hyphenated},
        **options,
    )


def _verbs() -> typer.Typer:
    """The application of `treadle` alone: it lists the verbs (each a stand-in, none is imported) and refuses others."""
    app = verb_app(
        "Treadle trains, evaluates and serves language models from one model definition.", no_args_is_help=True
    )
    for name, text in VERBS.items():
        app.command(name, help=text)(lambda: None)

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", help="Print the version and exit.", callback=_version, is_eager=True
        ),
        debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error.", callback=_debug),
    ) -> None:
        pass

    return app


def _version(wanted: bool) -> None:
    if wanted:
        from treadle import __version__

        print(f"treadle {__version__}")
        raise typer.Exit


def report(error: Exception) -> int:
    """Print `error` as one sentence on stderr and return the exit code it stands for."""
    from treadle.config.errors import TreadleError

    if hasattr(error, "show") and hasattr(error, "exit_code"):  # Typer's own: a wrong option, a missing argument
        error.show()
        return error.exit_code
    if isinstance(error, TreadleError):
        print(f"treadle: {error}", file=sys.stderr)
        return error.exit_code
    print(f"treadle: internal error: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
    return 1


def _hyphenated(name: str) -> str:
    """Take the option name kv_cache_dtype for kv-cache-dtype; values never come here."""
    return name.replace("_", "-")
