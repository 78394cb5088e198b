"""The loss curve as a picture: what it shows lies where the numbers say."""

from __future__ import annotations

import math
import xml.etree.ElementTree as xml

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.train.curve import DOTS, smoothed, sparkline, svg_curve, terminal_curve, ticks


def dots(line: str) -> list[tuple[int, int]]:
    """Return (column, row) of every dot in a line of braille, rows from the top."""
    found = []
    for cell, character in enumerate(line):
        bits = ord(character) - 0x2800
        if 0 <= bits < 256:
            found += [(2 * cell + c, r) for c in range(2) for r in range(4) if bits & DOTS[c][r]]
    return found


def test_a_falling_line_falls_from_the_upper_left_to_the_lower_right() -> None:
    lines = terminal_curve([(step, 4.0 - step / 10) for step in range(31)], width=30, height=8)
    plot = [line[10:] for line in lines[1:9]]
    rows = {}
    for index, line in enumerate(plot):
        for column, row in dots(line):
            rows.setdefault(column, []).append(4 * index + row)
    assert sorted(rows) == list(range(60))
    middles = [sum(rows[column]) / len(rows[column]) for column in range(60)]
    assert middles == sorted(middles)
    assert rows[0] == [0] and rows[59][-1] == 31
    assert lines[1].startswith("   4.000 ┤") and lines[8].startswith("   1.000 ┤")
    assert lines[-1].strip().startswith("0") and lines[-1].endswith("step 30")


def test_a_jump_is_joined() -> None:
    lines = terminal_curve([(0, 1.0), (1, 1.0), (2, 9.0), (3, 9.0)], width=20, height=5)
    rows = {4 * index + row for index, line in enumerate(lines[1:6]) for _, row in dots(line[10:])}
    assert rows == set(range(20))


def test_too_few_points_and_constant_ones_draw_nothing_wrong() -> None:
    assert terminal_curve([]) == []
    assert terminal_curve([(1, 2.0), (2, math.nan)]) == []
    assert terminal_curve([(1, 2.0), (2, 2.0)])
    assert sparkline([], 10) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 60))
def test_a_sparkline_fits_and_has_its_extremes(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert "▁" in line


@given(st.floats(-1e5, 1e5), st.floats(1e-3, 1e5))
def test_ticks_span_what_they_label_with_round_steps(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert found[0] <= low + 1e-6 * span and found[-1] >= low + span - 1e-6 * span
    assert 3 <= len(found) <= 14
    step = found[1] - found[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - good) for good in (1, 2, 5)) < 1e-3


def test_the_svg_is_well_formed_and_holds_both_curves() -> None:
    picture = svg_curve([(i, 5 - i / 100) for i in range(5000)], [(100, 4.2), (200, 3.9)], "Loss of <run & co>")
    root = xml.fromstring(picture)
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("polyline") == 3 and names.count("circle") == 2
    assert "Loss of <run & co>" in [element.text for element in root.iter()]
    assert len(picture) < 120_000
    for element in root.iter():
        for x, y in (point.split(",") for point in element.get("points", "").split()):
            assert 0 <= float(x) <= 860 and 0 <= float(y) <= 420
    xml.fromstring(svg_curve([], [], "nothing yet"))


def test_smoothing_has_no_bias_at_the_start() -> None:
    assert [y for _, y in smoothed([(i, 3.0) for i in range(100)])] == pytest.approx([3.0] * 100)
