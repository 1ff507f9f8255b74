"""Tables of a BPE vocabulary: the character that stands for each byte, and the pairs that merge. Part 1."""

from collections.abc import Iterable, Sequence


def byte_alphabet() -> dict[int, str]:
    """The printable character that GPT-2's vocabulary files write for each byte, such as 'Ġ' for a space."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {byte: chr(byte) for byte in printable}
    not_printable = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(256 + i) for i, byte in enumerate(not_printable)}  # 'Ā', 'ā', and so on


def merge_table(
    vocab: dict[str, int], merges: Iterable[tuple[str, str]]
) -> dict[tuple[int, int], tuple[int, int]]:
    """The map (left id, right id) -> (rank, merged id) of `merges`, pairs of tokens in order of rank.

    A pair of a lower rank was learned earlier, and is merged first. Raises KeyError if `vocab` lacks a token
    of a merge.
    """
    table: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, (left, right) in enumerate(merges):
        table[vocab[left], vocab[right]] = rank, vocab[left + right]
    return table


def byte_token_ids(vocab: dict[str, int], spellings: Sequence[str]) -> list[int]:
    """[256]: the id of each byte's token. `spellings` [256] has the token's text in `vocab`.

    Raises ValueError if a byte has no token.
    """
    for byte, spelling in enumerate(spellings):
        if spelling not in vocab:
            raise ValueError(f"the vocabulary has no token for byte {byte}")
    return [vocab[spelling] for spelling in spellings]
