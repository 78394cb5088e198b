"""The page in a real Chromium: what a person types, sees and stops."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, Tab, find_chromium
from tests.serve.api.scripted import ScriptedEngine
from tests.serve.serving import Served
from tests.serve.tiny import CONFIG, TEXT, TOKENS, build
from treadle.model.families import read_spec
from treadle.model.tokenizer import Tokenizer
from treadle.serve.engine import Engine
from treadle.serve.interface import Prepared, Ticket
from treadle.serve.model import Model
from treadle.serve.request import Delta, FinishReason
from treadle.serve.stats import EngineStats

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium was found; install it (on Debian: apt-get install chromium)"
)
ANSWER = ".assistant:last-child .text"


class PacedEngine(ScriptedEngine):
    """Says what the test lets it say, when the test lets it."""

    def __init__(self, tokenizer: Tokenizer, model: Model) -> None:
        super().__init__(tokenizer, model.spec, [])
        self.deliver: Callable[[Delta], None] = lambda delta: None
        self.changed = threading.Condition()

    def hand_over(self, prepared: Prepared, deliver: Callable[[Delta], None]) -> Ticket:
        with self.changed:
            self.asked.append(prepared)
            self.deliver = deliver
            self.changed.notify_all()
        return _Cancels(self)

    def say(self, text: str, reason: FinishReason | None = None, error: str | None = None) -> None:
        tokens = (1,) if text else ()
        self.deliver(Delta(0, text, tokens, finish_reason=reason, error=error, completion_tokens=1))

    def end(self, text: str = "") -> None:
        self.say(text, FinishReason.STOP)


class _Cancels(Ticket):
    def __init__(self, engine: PacedEngine) -> None:
        self.engine, self.prompt_tokens = engine, 0

    def cancel(self) -> None:
        self.engine.say("", FinishReason.CANCELLED)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def open_page(browser: Browser) -> Generator[Callable[..., Tab]]:
    """Return a function that opens a server's page and waits until it knows the server."""
    tabs: list[Tab] = []

    def start(server: Served, ready: str = "document.querySelector('#card-speed')", **options: Any) -> Tab:
        tabs.append(browser.open(server.url + "/", **options))
        tabs[-1].until(ready)
        return tabs[-1]

    yield start
    for tab in tabs:
        tab.close()


@pytest.fixture
def paced(tokenizer: Tokenizer, model: Model) -> Generator[Served]:
    server = Served(PacedEngine(tokenizer, model), names=["tiny"])
    yield server
    server.close()


def ask(tab: Tab, text: str) -> None:
    tab.click("#message")
    tab.type(text)
    tab.press("Enter")


def shows(tab: Tab, selector: str, text: str) -> None:
    """Wait until an element's text is exactly this."""
    tab.until(f"document.querySelector({json.dumps(selector)})?.innerText.trim() === {json.dumps(text)}")


def has(tab: Tab, selector: str, text: str) -> None:
    tab.until(f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})")


def asked(server: Served, count: int) -> list[str]:
    """Return the prompts that arrived once there are so many."""
    engine = server.engine
    with engine.changed:
        assert engine.changed.wait_for(lambda: len(engine.asked) >= count, timeout=30)
    return [engine.prompt(number) for number in range(count)]


def test_an_answer_is_shown_as_it_comes(paced: Served, open_page: Callable[..., Tab]) -> None:
    tab = open_page(paced)
    assert tab.value("document.activeElement.id") == "message" and tab.text("#status") == "ready"
    tab.click("#settings summary")
    tab.click("#system")
    tab.type("Be brief.")
    tab.click("#max-tokens")
    tab.type("77")
    ask(tab, "What is 2 * 3?")
    has(tab, ".user", "What is 2 * 3?")
    asked(paced, 1)
    for said in ("Six", " of", " course"):
        paced.engine.say(said)
        tab.until(f"document.querySelector({json.dumps(ANSWER)}).innerText.endsWith({json.dumps(said.strip())})")
        assert tab.value("document.querySelector('#send').hidden && !document.querySelector('#stop').hidden")
    paced.engine.end(".")
    shows(tab, ANSWER, "Six of course.")
    has(tab, ".assistant footer", "first after")
    assert tab.value("!document.querySelector('#send').hidden && document.querySelector('#stop').hidden")

    ask(tab, "Sure?")
    first, second = asked(paced, 2)
    assert "Be brief." in first and "What is 2 * 3?" in first
    assert all(part in second for part in ("Be brief.", "What is 2 * 3?", "Six of course.", "Sure?"))
    settings = paced.engine.asked[0].settings
    assert settings.temperature == 0.7 and settings.max_tokens == 77
    paced.engine.end("Yes.")
    shows(tab, ANSWER, "Yes.")
    assert all(address.startswith(paced.url) for address in tab.requested) and not tab.problems


HOSTILE = """# A list
Some *soft*, **loud** and `x < y` text with 2 * 3 * 4.
<img src=x onerror="window.hacked = 1"> <script>window.hacked = 1</script> [a](javascript:window.hacked=1)

- one
- two `*not*`
  1. deeper

```html
<b onclick="window.hacked = 1">&amp;</b>

```
> quoted
> twice
"""


def test_what_a_model_says_is_text_whatever_it_says(paced: Served, open_page: Callable[..., Tab]) -> None:
    tab = open_page(paced)
    ask(tab, "<img src=x onerror='window.hacked = 1'>")
    asked(paced, 1)
    for character in HOSTILE:
        paced.engine.say(character)
    paced.engine.end()
    has(tab, ".assistant footer", "first after")
    inside = f"document.querySelector({json.dumps(ANSWER)})"
    assert tab.value(f"{inside}.querySelectorAll('img, script, a, [onclick], [onerror]').length") == 0
    assert tab.value("window.hacked") is None and tab.value("document.querySelectorAll('.user img').length") == 0
    assert tab.value(f"{inside}.querySelector('pre code').textContent") == HOSTILE.split("```")[1][5:-1]
    found = tab.value(f"[...{inside}.querySelectorAll('h3, em, strong, p code, blockquote, ol')].map(e => e.innerText)")
    assert found == ["A list", "soft", "loud", "x < y", "deeper", "quoted\ntwice"]
    assert "2 * 3 * 4." in tab.text(ANSWER) and '<img src=x onerror="window.hacked = 1">' in tab.text(ANSWER)
    assert tab.value(f"{inside}.querySelectorAll('li').length") == 3
    # In pieces and as a whole it is the same.
    streamed = tab.value(f"{inside}.innerHTML")
    tab.click("button.again")
    asked(paced, 2)
    paced.engine.end(HOSTILE)
    has(tab, ".assistant footer", "first after")
    assert tab.value(f"{inside}.innerHTML") == streamed and not tab.problems


def test_reasoning_is_set_apart(paced: Served, open_page: Callable[..., Tab]) -> None:
    tab = open_page(paced)
    ask(tab, "Why?")
    asked(paced, 1)
    for piece in ("<think>", "Let me", " see.", "</think>", "Because."):
        paced.engine.say(piece)
    paced.engine.end()
    shows(tab, ANSWER, "Because.")
    assert tab.value("document.querySelector('.thoughts div').textContent") == "Let me see."
    ask(tab, "Really?")
    *_, second = asked(paced, 2)
    assert "Because." in second and "Let me see." not in second


def test_stopping_frees_everything_at_once(tokenizer: Tokenizer, open_page: Callable[..., Tab]) -> None:
    endless = Tokenizer(tokenizer.backend, chat_templates=tokenizer.chat_templates)  # no token ends an answer
    model = Model(build(read_spec({**CONFIG, "max_position_embeddings": 16384})), endless)
    server = Served(Engine(model, max_num_seqs=2), names=["tiny"])
    try:
        tab = open_page(server)
        for stop in (lambda: tab.press("Escape"), lambda: tab.click("#stop"), lambda: tab.click("#new-chat")):
            ask(tab, "Tell me")
            tab.until(f"document.querySelector({json.dumps(ANSWER)})?.innerText.length > 20")
            has(tab, "#card-sequences .value", "1 running")
            stop()
            deadline = time.monotonic() + 30
            while server.engine.call(lambda: server.engine.stats.running or server.engine.stats.blocks_held):
                assert time.monotonic() < deadline
            tab.until("!document.querySelector('#send').hidden")
            has(tab, "#card-sequences .value", "0 running")
        assert server.engine.stats.finished == {"cancelled": 3}
        assert tab.value("document.querySelectorAll('#conversation li').length") == 0, "a new chat is empty"
    finally:
        server.close()


def test_errors_are_one_sentence_and_can_be_tried_again(paced: Served, open_page: Callable[..., Tab]) -> None:
    tab = open_page(paced)
    ask(tab, "a")
    asked(paced, 1)
    paced.engine.say("Begun")
    paced.engine.say("", FinishReason.ERROR, error="the memory is full")
    shows(tab, ".assistant .error", "The memory is full.")
    assert tab.text(ANSWER) == "Begun", "what came before stays"
    tab.click("button.again")
    asked(paced, 2)
    paced.engine.end("Whole")
    shows(tab, ANSWER, "Whole")
    assert tab.value("document.querySelectorAll('.error').length") == 0

    ask(tab, "x " * 5000)
    has(tab, ".assistant:last-child .error", "4096")
    assert tab.text(".assistant:last-child .error").endswith("."), "a refusal of the server"
    paced.close()
    shows(tab, "#status", "not reachable")
    shows(tab, "#notice-text", "The server cannot be reached.")
    tab.click("button.again")
    shows(tab, ".assistant:last-child .error", "The server cannot be reached.")


def test_the_key_is_asked_for_once(
    paced: Served, tokenizer: Tokenizer, model: Model, open_page: Callable[..., Tab]
) -> None:
    server = Served(PacedEngine(tokenizer, model), names=["tiny"], api_key="s3cr\u00e9t")
    try:
        tab = open_page(server, ready="document.querySelector('#key-dialog').open")
        tab.type("wrong")
        tab.press("Enter")
        shows(tab, "#key-text", "The server did not accept that key.")
        tab.press("Escape")
        shows(tab, "#status", "locked")
        tab.click("#enter-key")
        tab.until("document.querySelector('#key-dialog').open")
        tab.type("s3cr\u00e9t")
        tab.press("Enter")
        tab.until("document.querySelector('#card-speed')")
        assert not tab.value("document.querySelector('#key-dialog').open")
        ask(tab, "hello")
        asked(server, 1)
        server.engine.end("Hi.")
        shows(tab, ANSWER, "Hi.")
        tab.go(server.url + "/")
        tab.until("document.querySelector('#card-speed')")
        shows(tab, ANSWER, "Hi.")
        assert tab.value("Object.keys(localStorage).length") == 0 and "s3cr" not in tab.value("document.cookie")
    finally:
        server.close()


def test_keys_and_what_is_kept(paced: Served, open_page: Callable[..., Tab]) -> None:
    tab = open_page(paced)
    tab.click("#message")
    tab.press("Enter")
    tab.type("one")
    tab.press("Enter", shift=True)
    tab.type("two")
    assert tab.value("document.querySelector('#message').value") == "one\ntwo"
    assert tab.value("document.querySelectorAll('#conversation li').length") == 0, "an empty message is not sent"
    tab.press("Enter")
    (prompt,) = asked(paced, 1)
    assert "one\ntwo" in prompt
    paced.engine.say("Par")
    shows(tab, ANSWER, "Par")
    tab.press("Escape")
    has(tab, ".assistant footer", "stopped")
    tab.click("#settings summary")
    tab.click("#temperature")
    tab.value("document.querySelector('#temperature').select()")
    tab.type("9")
    ask(tab, "three")
    assert tab.value("document.querySelector('#temperature').validity.rangeOverflow")
    assert len(paced.engine.asked) == 1, "a wrong setting is not sent"
    tab.go(paced.url + "/")
    shows(tab, ANSWER, "Par")
    assert tab.text(".user .text") == "one\ntwo" and "stopped" in tab.text(".assistant footer")
    tab.click("#new-chat")
    tab.until("!document.querySelector('#welcome').hidden")
    assert tab.value("document.activeElement.id") == "message"


def test_a_model_without_a_chat_template_goes_on_with_the_text(model: Model, open_page: Callable[..., Tab]) -> None:
    plain = Tokenizer.train([TEXT] * 4, TOKENS, extra_special_tokens=())
    server = Served(PacedEngine(plain, model), names=["base"])
    try:
        tab = open_page(server)
        assert "goes on with the text" in tab.text("#welcome")
        assert tab.value("document.querySelector('#system-field').hidden")
        ask(tab, "def read")
        assert asked(server, 1)[0].endswith("|>def read") and server.engine.asked[0].max_tokens == 128
        server.engine.end("(path):\n    **x**")
        has(tab, ".assistant footer", "first after")
        assert tab.value(f"document.querySelector({json.dumps(ANSWER)}).textContent") == "(path):\n    **x**"
        ask(tab, " + y")
        *_, second = asked(server, 2)
        assert second.endswith("|>def read(path):\n    **x** + y")
        server.engine.end("")
    finally:
        server.close()


def test_the_live_state_is_what_the_engines_say(
    paced: Served, open_page: Callable[..., Tab], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = EngineStats(
        running=2, waiting=1, blocks=100, blocks_held=25, steps=1, prompt_tokens=50, looked_up_tokens=50,
        cached_tokens=20, preemptions=7, budget_tokens=2048, budget_seqs=16, drafted_tokens=8, accepted_tokens=6,
        finished={"stop": 4, "length": 1}, decision="3 sequences; <b>all</b> fit",
    )  # fmt: skip
    monkeypatch.setattr(type(paced.engine), "engine_stats", [first])
    monkeypatch.setattr(paced.engine, "weight_version", "v2-abc")
    monkeypatch.setattr(paced.engine, "summary", ["dtype     float32 on cpu (2 threads)", "note      a", "note      b"])
    tab = open_page(paced)
    for card, value, more in (
        ("sequences", "2 running", "1 waiting"),
        ("cache", "25 %", "of 16,384 tokens"),
        ("prefix", "40 %", "of 50 prompt tokens"),
    ):
        assert (tab.text(f"#card-{card} .value"), tab.text(f"#card-{card} .more")) == (value, more)
    assert tab.text("#status") == "working"
    facts = tab.value("[...document.querySelectorAll('#facts > *')].map(e => e.innerText)")
    shown = dict(zip(facts[::2], facts[1::2], strict=True))
    expected = {
        "dtype": "float32 on cpu (2 threads)", "Weights": "v2-abc", "Context": "4,096 tokens", "Preemptions": "7",
        "Ended": "4 stop, 1 length", "Guesses that held": "75 %", "Last step allowed": "2,048 tokens, 16 sequences",
        "Last decision": "3 sequences; <b>all</b> fit",
    }  # fmt: skip
    assert {name: shown[name] for name in expected} == expected
    assert tab.value("document.querySelector('#summary').textContent").endswith("notea\nb")

    first.generated_tokens, first.steps = 1000, 11
    first.steps_by_tokens.total, first.steps_by_seqs.total, first.step_seconds = 120, 30, 0.25
    tab.until("parseFloat(document.querySelector('#card-speed .value').innerText.replace(',', '')) > 100")
    assert tab.text("#card-step .value") == "12" and tab.text("#card-step .more") == "3.0 sequences, 25.0 ms"
    line = "document.querySelector('#card-speed path').getAttribute('d')"
    assert tab.value(line).count("L") >= 1

    monkeypatch.setattr(type(paced.engine), "engine_stats", [first, EngineStats(running=5, blocks=100)])
    shows(tab, "#card-sequences .value", "7 running")
    rows = tab.value("[...document.querySelectorAll('#engines tbody tr')].map(e => e.innerText)")
    assert [" ".join(row.split()) for row in rows] == ["0 2 1 25 %", "1 5 0 0 %"]
    first.asleep = True
    shows(tab, "#status", "asleep")
    has(tab, "#notice-text", "The engine is asleep")
    monkeypatch.setattr(paced.engine, "unhealthy", "engine process 0 (pid 7) has not answered for 9 s")
    shows(tab, "#status", "not healthy")
    shows(tab, "#notice-text", "The engine makes no steps: engine process 0 (pid 7) has not answered for 9 s.")
    monkeypatch.setattr(paced.engine, "unhealthy", "")
    first.asleep = False
    shows(tab, "#status", "working")
    assert tab.value("document.querySelector('#notice').hidden")


def test_it_fits_narrow_and_dark_screens(paced: Served, open_page: Callable[..., Tab], tmp_path: Path) -> None:
    tab = open_page(paced, width=320, height=600, dark=True)
    ask(tab, "x" * 200)
    asked(paced, 1)
    paced.engine.end("`" + "y" * 200 + "`\n```\n" + "z" * 200 + "\n```\n" + "w" * 200)
    has(tab, ".assistant footer", "first after")
    fits = "document.documentElement.scrollWidth <= innerWidth && document.documentElement.scrollHeight <= innerHeight"
    background = "getComputedStyle(document.body).backgroundColor"
    assert tab.value(fits) and tab.value("getComputedStyle(document.querySelector('#state')).display") == "none"
    inside = "e => e.closest('pre') || e.getBoundingClientRect().right <= innerWidth"
    assert tab.value(f"[...document.querySelectorAll('#conversation *')].every({inside})")
    tab.click("#show-state")
    assert tab.value("document.querySelector('#show-state').getAttribute('aria-expanded')") == "true"
    assert tab.value("document.querySelector('#state').getBoundingClientRect().width") == 320
    assert tab.value(fits)
    dark = tab.value(background)
    tab.shape(1200, 800)
    assert tab.value(background) != dark and tab.value(fits)
    assert tab.value("document.querySelector('#show-state').getBoundingClientRect().width") == 0
    assert tab.value("document.querySelector('#state').getBoundingClientRect().left") > 800
    tab.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
