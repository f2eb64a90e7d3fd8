"""The drafter service: guesses tokens from what was said before, asked one step early."""

from finback.shared.wire.codec import message


@message("draft.DraftRow/1")
class DraftRow:
    """One sequence. `token_ids` (int32 LE) are its tokens from `position` on, all that is new.

    A drafter that lacks what lies before `position` answers `need_from`.
    """

    request_id: str
    choice: int
    position: int
    token_ids: bytes
    num_draft_tokens: int


@message("draft.DraftRequest/1")
class DraftRequest:
    """Asked on `drafter.draft`; a late answer is dropped, never waited for."""

    instance: str
    epoch: int
    rows: tuple[DraftRow, ...]
    ended: tuple[tuple[str, int], ...] = ()


@message("draft.Draft/1")
class Draft:
    """A guess for the tokens at absolute positions `position`, `position + 1`, ...

    `need_from` set: the drafter lacks tokens from there on and has no guess.
    """

    request_id: str
    choice: int
    position: int
    token_ids: bytes = b""
    need_from: int | None = None


@message("draft.DraftReply/1")
class DraftReply:
    """Guesses for some of the rows; a row without one gets none this time."""

    drafts: tuple[Draft, ...]
