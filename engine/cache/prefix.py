"""Finds blocks by the tokens whose keys and values they hold, so that a prompt's beginning is computed once.

A key depends on its token, on all tokens before it, on the adapter, and on nothing else. So a full block is
found by its own tokens and all tokens before: a chain of hashes, each made of the last hash and one block's
tokens. Equal hashes are no proof, so token ids are compared, too. Knows no sequences and no tensors. Part 12.
"""

from collections.abc import Sequence


class Prefix:
    """The tokens of one full block, and the prefix before it (`parent`). A `root` has an adapter and a salt
    in place of tokens. Two prefixes are equal if their tokens and their parents are equal.
    """

    __slots__ = ("_hash", "parent", "token_ids")

    def __init__(self, parent: "Prefix | None", token_ids: tuple) -> None:
        self.parent, self.token_ids = parent, token_ids
        # The parent has stored its hash, so only this block's tokens are hashed.
        self._hash = hash((parent, token_ids))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prefix):
            return NotImplemented
        prefix: Prefix | None = self
        other_prefix: Prefix | None = other
        while prefix is not other_prefix:  # until both chains meet in one object, often the first parent
            if prefix is None or other_prefix is None or prefix.token_ids != other_prefix.token_ids:
                return False
            prefix, other_prefix = prefix.parent, other_prefix.parent
        return True


def root(adapter: str | None, cache_salt: str | None) -> Prefix:
    """The start of a chain. Sequences with different adapters or salts have different roots, and share no
    block.
    """
    return Prefix(None, (adapter, cache_salt))


class PrefixCache:
    """Maps each known prefix to the block that holds its last tokens, and each known block to its prefix."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._block: dict[Prefix, int] = {}  # the block of each known prefix
        self._prefix: dict[int, Prefix] = {}  # the prefix of each known block
        self._draft_computed: set[int] = set()  # known blocks that a draft model has computed, too (Part 16)

    def __len__(self) -> int:
        return len(self._block)

    def __contains__(self, block: int) -> bool:
        return block in self._prefix

    def blocks(self) -> list[int]:
        """All known blocks, in no order."""
        return list(self._prefix)

    def prefix(self, block: int) -> Prefix:
        """The prefix whose last tokens a known block holds. Raises KeyError for any other block."""
        return self._prefix[block]

    def add(self, prefix: Prefix, block: int) -> Prefix:
        """Note that `block` holds the last tokens of `prefix`, unless another block is known for them
        already. Returns the stored prefix, which is the next block's parent.
        """
        known_block = self._block.get(prefix)
        if known_block is not None:
            return self._prefix[known_block]
        self._block[prefix] = block
        self._prefix[block] = prefix
        return prefix

    def forget(self, block: int) -> None:
        """Remove a block, which will be overwritten. Does nothing for a block that is not known."""
        prefix = self._prefix.pop(block, None)
        if prefix is not None:
            del self._block[prefix]
            self._draft_computed.discard(block)

    def mark_draft_computed(self, blocks: Sequence[int]) -> None:
        """Note that a draft model has computed these blocks, too, and all before them in their sequence."""
        self._draft_computed.update(block for block in blocks if block in self._prefix)

    def num_draft_computed(self, blocks: Sequence[int]) -> int:
        """How many of a sequence's first blocks a draft model has computed, too."""
        for i, block in enumerate(blocks):
            if block not in self._draft_computed:
                return i
        return len(blocks)

    def match(
        self, token_ids: Sequence[int], adapter: str | None = None, cache_salt: str | None = None
    ) -> list[int]:
        """The blocks of the longest known beginning of a sequence, in order. They hold at most all tokens but
        one, since the last token must be computed for its logits.
        """
        blocks: list[int] = []
        prefix = root(adapter, cache_salt)
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            prefix = Prefix(prefix, tuple(token_ids[start : start + self.block_size]))
            block = self._block.get(prefix)
            if block is None:
                break
            blocks.append(block)
            prefix = self._prefix[block]  # the stored object, where the next comparison can end
        return blocks
