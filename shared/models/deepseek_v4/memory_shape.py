"""What kind of memory a layer of a given ratio has. Pure, torch-free."""

from finback.shared.models.deepseek_v4.config import CSA_RATIO


def has_overlap(ratio: int) -> bool:
    """Does an entry also see the window before its own (CSA)."""
    return ratio == CSA_RATIO


def has_indexer(ratio: int) -> bool:
    """Are entries chosen by score (CSA), or all attended to (HCA)."""
    return ratio == CSA_RATIO


def num_tail_rows(ratio: int) -> int:
    """Positions before a step that an entry closing in it may need."""
    return 2 * ratio - 1 if has_overlap(ratio) else ratio - 1
