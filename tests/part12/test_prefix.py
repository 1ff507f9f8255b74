"""The prefix cache: a beginning is found by its tokens, all of them, and by nothing else."""

import random

import pytest

from engine.cache.prefix import Prefix, PrefixCache, root


def remember(cache: PrefixCache, token_ids, blocks, adapter=None, salt=None) -> None:
    """The full blocks of a sequence, as a cache commits them."""
    prefix, P = root(adapter, salt), cache.block_size
    for i, block in enumerate(blocks):
        prefix = cache.add(Prefix(prefix, tuple(token_ids[i * P : (i + 1) * P])), block)


@pytest.fixture
def cache():
    """Blocks of 2 tokens; the sequence 1 to 6 lies in blocks 7, 8, 9."""
    cache = PrefixCache(2)
    remember(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    return cache


@pytest.mark.parametrize(
    ("token_ids", "blocks", "why"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [7, 8, 9], "all three blocks are known"),
        (
            [1, 2, 3, 9, 5, 6, 7],
            [7],
            "its second block differs, and what comes behind a difference does not count",
        ),
        ([9, 2, 3, 4, 5, 6, 7], [], "its first block differs"),
        (
            [3, 4, 5, 6, 7],
            [],
            "these tokens are known only behind 1, 2: a key depends on all tokens before it",
        ),
        ([1, 2, 3], [7], "only full blocks are shared"),
        ([1, 2, 3, 4, 5, 6], [7, 8], "the last token must be computed: at most all tokens but one are found"),
        ([1, 2], [], "the last token must be computed: at most all tokens but one are found"),
        ([1], [], "no full block"),
    ],
    ids=[
        "all",
        "second differs",
        "first differs",
        "without its beginning",
        "half a block",
        "all but one",
        "2",
        "1",
    ],
)
def test_the_longest_known_beginning_is_found(cache, token_ids, blocks, why):
    assert cache.match(token_ids) == blocks, why


@pytest.mark.parametrize(("adapter", "salt"), [("poetry", None), (None, "mine"), ("mine", None)])
def test_another_adapter_or_salt_shares_nothing(cache, adapter, salt):
    token_ids = [1, 2, 3, 4, 5, 6, 7]
    assert cache.match(token_ids, adapter, salt) == [], "another adapter or salt makes another chain"
    remember(cache, token_ids, [1, 2], adapter, salt)
    assert cache.match(token_ids, adapter, salt) == [1, 2]
    assert cache.match(token_ids) == [7, 8, 9]


def test_the_block_that_was_first_stays_known(cache):
    """Two requests that compute the same tokens at the same time have a block each."""
    remember(cache, [1, 2, 3, 4, 8, 8], [4, 5, 6])
    assert cache.match([1, 2, 3, 4, 8, 8, 0]) == [7, 8, 6]
    assert 4 not in cache
    assert 6 in cache


def test_what_is_forgotten_is_not_found_and_what_comes_behind_it_neither(cache):
    cache.forget(8)
    assert cache.match([1, 2, 3, 4, 5, 6, 7]) == [7], (
        "block 9 is known, but not what comes before it: the search ends at the first block missing"
    )
    assert 8 not in cache
    assert 9 in cache
    cache.forget(8)
    assert len(cache) == 2


def test_what_a_draft_model_computed_is_forgotten_with_its_block(cache):
    cache.mark_draft_computed([7, 8, 9])
    assert cache.num_draft_computed([7, 8, 9]) == 3
    cache.forget(8)
    remember(cache, [1, 2, 30, 40], [7, 8])
    assert cache.num_draft_computed([7, 8]) == 1, "block 8 has other tokens, which no draft model has read"


def test_a_block_whose_beginning_was_computed_anew_is_found_again(cache):
    """Block 8 is lost; block 9, behind it, is still there when another block takes 8's place."""
    cache.forget(8)
    remember(cache, [1, 2, 3, 4], [7, 5])
    assert cache.match([1, 2, 3, 4, 5, 6, 7]) == [7, 5, 9]


class Counted(int):
    """A token id that counts how often tokens are hashed, and compared with an equal one."""

    hashed = compared = 0

    def __hash__(self) -> int:
        Counted.hashed += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return super().__eq__(other)


def test_each_token_is_hashed_once_and_compared_once_however_long_the_beginning(monkeypatch):
    cache, ids = PrefixCache(2), range(1, 201)
    remember(cache, list(map(Counted, ids)), list(range(100)))
    monkeypatch.setattr(Counted, "hashed", 0)
    monkeypatch.setattr(Counted, "compared", 0)
    assert cache.match([*map(Counted, ids), 0]) == list(range(100))
    assert Counted.hashed <= 2 * 200, (
        f"a chain of hashes grows by one block's work at a time: 200 tokens, and {Counted.hashed} were hashed"
    )
    assert Counted.compared <= 2 * 200, (
        f"a hit compares back to the record that both chains share, the stored one of the block before: 200 "
        f"tokens, and {Counted.compared} were compared"
    )


def test_equal_hashes_are_no_proof(monkeypatch):
    """Every hash collides: only the token ids tell."""
    monkeypatch.setattr(Prefix, "__hash__", lambda self: 1)
    cache = PrefixCache(2)
    remember(cache, [1, 2, 3, 4], [0, 1])
    remember(cache, [5, 6, 3, 4], [2, 3])
    for token_ids, blocks in {
        (1, 2, 3, 4, 0): [0, 1],
        (5, 6, 3, 4, 0): [2, 3],
        (1, 2, 4, 3, 0): [0],
        (7, 8, 3, 4, 0): [],
    }.items():
        assert cache.match(token_ids) == blocks, "token ids are compared, down to the first"


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_what_a_search_through_all_of_them_finds(seed):
    rng = random.Random(seed)
    cache, known = PrefixCache(3), {}  # (adapter, tokens so far) -> block
    for number in range(60):
        adapter = rng.choice([None, "a"])
        token_ids = [rng.randint(0, 1) for _ in range(rng.randint(1, 14))]
        expected = []
        for end in range(3, len(token_ids), 3):
            if (adapter, *token_ids[:end]) not in known:
                break
            expected.append(known[adapter, *token_ids[:end]])
        assert cache.match(token_ids, adapter) == expected
        blocks = [100 * number + i for i in range(len(token_ids) // 3)]
        for i, block in enumerate(blocks):
            known.setdefault((adapter, *token_ids[: 3 * i + 3]), block)
        remember(cache, token_ids, blocks, adapter)
        if known and rng.random() < 0.5:
            lost = rng.choice(list(known))
            cache.forget(known.pop(lost))


def test_chains_as_long_as_a_book_are_compared_without_recursion():
    ends = []
    for _ in range(2):
        prefix = root(None, None)
        for token_id in range(20_000):
            prefix = Prefix(prefix, (token_id,))
        ends.append(prefix)
    assert ends[0] == ends[1]
    assert hash(ends[0]) == hash(ends[1])
    assert ends[0] != Prefix(ends[1], (1,))
