"""Which blocks hold the keys and values of which tokens: so that a prompt's beginning is computed once.

A key depends on its token and on all tokens before it, on the adapter, and on nothing else. So a full block
is found by its own tokens and everything before them: a chain of hashes, each made of the last one and one
block's tokens. Equal hashes are not taken as proof: token ids are compared. Knows no sequences and no
tensors. Part 12.
"""

from collections.abc import Sequence


class Prefix:
    """The tokens of one full block, and all that stands before it. Equal to the same tokens after an equal
    parent, and to nothing else.
    """

    __slots__ = ("_hash", "parent", "token_ids")

    def __init__(self, parent: "Prefix | None", token_ids: tuple) -> None:
        self.parent, self.token_ids = parent, token_ids
        self._hash = hash(
            (parent, token_ids)
        )  # the parent keeps its hash: only this block's tokens are hashed

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prefix):
            return NotImplemented
        prefix: Prefix | None = self
        other_prefix: Prefix | None = other
        while prefix is not other_prefix:  # back to the block where both are one object: often the parent's
            if prefix is None or other_prefix is None or prefix.token_ids != other_prefix.token_ids:
                return False
            prefix, other_prefix = prefix.parent, other_prefix.parent
        return True


def root(adapter: str | None, cache_salt: str | None) -> Prefix:
    """Where a chain starts: sequences with another adapter or another salt share nothing."""
    return Prefix(None, (adapter, cache_salt))


class PrefixCache:
    """A map from known prefixes to the blocks that hold their last tokens, and back."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._block: dict[Prefix, int] = {}  # the block of each known prefix
        self._prefix: dict[int, Prefix] = {}  # the prefix of each known block
        self._draft_computed: set[int] = set()  # known blocks that a draft model has computed, too (Part 16)

    def __len__(self) -> int:
        return len(self._block)

    def __contains__(self, block: int) -> bool:
        return block in self._prefix

    def prefix(self, block: int) -> Prefix:
        """The prefix whose last tokens a known block holds."""
        return self._prefix[block]

    def add(self, prefix: Prefix, block: int) -> Prefix:
        """Make a block known: it holds this prefix's last tokens. If another block is known for them already,
        that one stays. Returns the prefix under which the block is known: the next block's parent.
        """
        known_block = self._block.setdefault(prefix, block)
        return self._prefix.setdefault(known_block, prefix)

    def forget(self, block: int) -> None:
        """A block will be overwritten: it is known no longer. Does nothing for one that is not known."""
        prefix = self._prefix.pop(block, None)
        if prefix is not None:
            del self._block[prefix]
            self._draft_computed.discard(block)

    def mark_draft_computed(self, blocks: Sequence[int]) -> None:
        """Note that a draft model has computed these blocks, too, and all before them in their sequence."""
        self._draft_computed.update(block for block in blocks if block in self._prefix)

    def num_draft_computed(self, blocks: Sequence[int]) -> int:
        """How many of a sequence's first blocks a draft model has computed, too."""
        return next((i for i, block in enumerate(blocks) if block not in self._draft_computed), len(blocks))

    def match(
        self, token_ids: Sequence[int], adapter: str | None = None, cache_salt: str | None = None
    ) -> list[int]:
        """The blocks of the longest known beginning of a sequence, in order. At most all tokens but one: the
        last must be computed, since its logits are wanted.
        """
        blocks: list[int] = []
        prefix = root(adapter, cache_salt)
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            prefix = Prefix(prefix, tuple(token_ids[start : start + self.block_size]))
            block = self._block.get(prefix)
            if block is None:
                break
            blocks.append(block)
            prefix = self._prefix[block]  # the stored record, not its equal: the next comparison ends at it
        return blocks
