"""Text as it comes: nothing of a stop string, no half characters, whatever the tokens' boundaries are."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from treadle.model.tokenizer import Tokenizer
from treadle.serve.text import TextOutput


class Pieces:
    """A decoder whose token i stands for the i-th piece of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, index: int) -> str:
        return self.pieces[index]

    def finish(self) -> str:
        return ""


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    """Return what came out after each piece (and at the end), and the stop string."""
    output = TextOutput(Pieces(pieces), stops)
    given_out = []
    for index in range(len(pieces)):
        text, stop = output.push(index)
        given_out.append(text)
        if stop is not None:
            return given_out, stop
    text, stop = output.finish()
    return [*given_out, text], stop


def brute_force(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read character by character; the first to complete a stop string ends the text before it."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            longest = max(endings, key=len)
            return text[: end - len(longest)], longest
    return text, None


pieces = st.lists(st.text("ab<>", max_size=4), max_size=12)
stops = st.lists(st.text("ab<>", min_size=1, max_size=5), min_size=1, max_size=4)


@given(pieces=pieces, stops=stops)
@example(pieces=["a<", "b", ">", "a"], stops=["<b>"])
@example(pieces=["ab", "a", "b>"], stops=["abab>", "ab>"])
@example(pieces=["aabab"], stops=["abab", "b"])
def test_any_split_gives_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    given_out, stop = run(pieces, stops)
    assert ("".join(given_out), stop) == brute_force("".join(pieces), stops)


@given(pieces=pieces, stops=stops)
def test_no_more_is_held_back_than_could_begin_a_stop(pieces: list[str], stops: list[str]) -> None:
    output, seen, shown = TextOutput(Pieces(pieces), stops), "", ""
    for index, piece in enumerate(pieces):
        text, stop = output.push(index)
        seen, shown = seen + piece, shown + text
        if stop is not None:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(stop.startswith(held) and held != stop for stop in stops)


def test_a_stop_is_text_while_a_minimum_is_not_reached() -> None:
    output = TextOutput(Pieces(["a#", "b#", "c#"]), ["#"])
    assert output.push(0, watch=False) == ("a#", None)
    assert output.push(1) == ("b", "#")


@given(text=st.text(max_size=30))
@example(text="\U0001f600\u00e9\u6771\u4eac" * 3)
def test_characters_over_several_tokens_come_whole(tokenizer: Tokenizer, text: str) -> None:
    output = TextOutput(tokenizer.stream(), ())
    tokens = tokenizer.encode(text, special_tokens=False, parse_special=False)
    shown = [output.push(token)[0] for token in tokens]
    rest, _ = output.finish()
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in [*shown, rest])
    assert "".join(shown) + rest == text


def test_an_unfinished_character_at_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ok \U0001f600", special_tokens=False)
    assert tokenizer.decode(tokens[:-1]).endswith("\ufffd"), "the emoji is several tokens"
    output = TextOutput(tokenizer.stream(), ("x",))
    shown = "".join(output.push(token)[0] for token in tokens[:-1])
    assert shown + output.finish()[0] == "ok "
