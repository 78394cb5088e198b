"""The pool's counts and states under random use, against a plain model of it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.serve.batch import LayerGroup
from treadle.serve.block_pool import BlockPool
from treadle.serve.block_tables import BlockTables, prefix_root


def test_blank_blocks_go_first_then_the_longest_unused() -> None:
    pool = BlockPool(3)
    first, second, third = pool.take(), pool.take(), pool.take()
    pool.remember(first, b"a")
    pool.remember(second, b"b")
    for block in (second, first, third):
        pool.release(block)
    assert pool.free == 3
    assert pool.take() == third  # blank
    assert pool.take() == second  # released before `first`
    assert pool.find(b"b") is None and pool.find(b"a") == first and pool.evictions == 1


def test_a_block_that_is_held_again_is_not_given_away() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.remember(block, b"a")
    pool.release(block)
    pool.hold(block)
    assert pool.free == 1 and pool.take() != block and pool.free == 0


def test_forgotten_content_is_never_found() -> None:
    pool = BlockPool(2)
    held, idle = pool.take(), pool.take()
    pool.remember(held, b"a")
    pool.remember(idle, b"b")
    pool.release(idle)
    pool.forget_all()
    assert pool.find(b"a") is None and pool.find(b"b") is None
    pool.check([[held]])
    pool.release(held)
    pool.check([])


def test_the_check_finds_a_leak() -> None:
    pool = BlockPool(2)
    block = pool.take()
    try:
        pool.check([])
    except AssertionError as error:
        assert f"block {block}" in str(error)
    else:
        raise AssertionError("a lost block went unnoticed")


WINDOWS = st.sampled_from([(0,), (8,), (0, 8), (5, 0), (3, 17)])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), windows=WINDOWS, block_size=st.sampled_from([1, 2, 4]))
def test_tables_hold_what_a_sequence_sees_and_nothing_is_lost(
    data: st.DataObject, windows: tuple[int, ...], block_size: int
) -> None:
    """Random lives of sequences over few tokens, so that prefixes are often shared; the pool is checked after each."""
    tables = BlockTables(
        [LayerGroup(window, (i,)) for i, window in enumerate(windows)], [30] * len(windows), block_size
    )
    alive: list[tuple] = []  # (blocks, tokens, computed)
    contents: dict[tuple[int, int], tuple[int, ...]] = {}  # (group, block) -> all tokens up to its end
    for _ in range(data.draw(st.integers(1, 40))):
        if alive and data.draw(st.booleans()):
            blocks, tokens, computed = alive.pop(data.draw(st.integers(0, len(alive) - 1)))
            tables.close(blocks)
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=24))
            blocks = tables.open(prefix_root(["m"]))
            hit = tables.find_prefix(blocks, tokens)
            needed = -(-len(tokens) // block_size) - hit.count
            if any(free - used < needed for free, used in zip(tables.free, hit.free, strict=True)):
                tables.close(blocks)
                tables.check()
                continue
            computed = tables.take_prefix(blocks, hit)
            assert computed < len(tokens)
            while computed < len(tokens):
                _assert_sees(tables, blocks, tokens, computed, windows, contents)
                step = data.draw(st.integers(1, len(tokens) - computed))
                tables.extend(blocks, computed + step)
                for group in range(len(windows)):
                    for entry in range(computed // block_size, -(-(computed + step) // block_size)):
                        block = int(blocks.tables[group][entry])
                        contents[group, block] = tuple(tokens[: min(computed + step, (entry + 1) * block_size)])
                computed += step
                tables.advance(blocks, tokens, computed, remember=True)
                tables.check()
            alive.append((blocks, tokens, computed))
        tables.check()
    for blocks, _, _ in alive:
        tables.close(blocks)
    tables.check()
    assert tables.free == (30,) * len(windows)


def _assert_sees(tables, blocks, tokens, computed, windows, contents) -> None:
    """Every block that the next token reads holds what the sequence computed, or would have."""
    size = tables.block_size
    for group, window in enumerate(windows):
        first = max(0, computed - window + 1) if window else 0
        for position in range(first, computed):
            block = int(blocks.tables[group][position // size])
            assert block != 0
            end = min(len(contents[group, block]), (position // size + 1) * size)
            assert contents[group, block][:end] == tuple(tokens[:end])
            assert end > position


def test_other_roots_share_nothing() -> None:
    tables = BlockTables([LayerGroup(0, (0,))], [8], 2)
    tokens = [1, 2, 3, 4, 5]
    one = tables.open(prefix_root(["v1", "", ""]))
    tables.extend(one, 5)
    tables.advance(one, tokens, 5, remember=True)
    assert tables.find_prefix(tables.open(prefix_root(["v1", "", ""])), tokens).count == 2
    for parts in (["v2", "", ""], ["v1", "adapter", ""], ["v1", "", "salt"], ["v1", "s", "alt"]):
        assert tables.find_prefix(tables.open(prefix_root(parts)), tokens).count == 0


def test_shrinking_gives_back_what_lies_behind() -> None:
    tables = BlockTables([LayerGroup(0, (0,))], [8], 2)
    blocks = tables.open(b"")
    tables.extend(blocks, 9)
    tables.shrink(blocks, 5)
    assert blocks.given == 3 and tables.free == (5,)
    tables.extend(blocks, 6)
    assert blocks.given == 3
    tables.check()
