"""The sampler service: compiles grammars and answers token bitmasks."""

from finback.shared.wire.codec import message
from finback.shared.wire.messages.generate import GrammarSpec


@message("sampler.CompileRequest/1")
class CompileRequest:
    """Asked by a gateway on `sampler.compile`: check and keep a grammar (or refuse it with 400).

    `vocab_size`: the width of the caller's logits; refused if the sampler's is another. 0: not told.
    """

    model: str
    grammar: GrammarSpec
    vocab_size: int = 0


@message("sampler.CompileReply/1")
class CompileReply:
    """`grammar_id` is the content hash; the same grammar gets the same id everywhere.

    `widened`: what is not enforced, each as a JSON pointer into the schema (`#/properties/a/not`):
    under `lenient` what cannot be, always a `format` that no specification defines. `engine` compiled it; `placement` is `shared` or, for one whose masks may
    be slow, `own`: the worker that computes them. `num_bytes`: what it takes to hold it.
    """

    grammar_id: str
    is_cached: bool
    compile_ms: float
    widened: tuple[str, ...] = ()
    engine: str = ""
    placement: str = ""
    num_bytes: int = 0


@message("sampler.MaskRow/1")
class MaskRow:
    """One sequence: completion tokens from index `position` on (int32 LE) that are new.

    `position` 0 with no tokens opens it. `grammar` goes along when the sampler asked for it.
    `guess_ids` (int32 LE): what may come behind them, by a drafter's guess. Up to `max_ahead` tokens
    that are forced, or guessed and allowed, come back with a mask behind each.
    """

    request_id: str
    choice: int
    grammar_id: str
    position: int
    token_ids: bytes = b""
    grammar: GrammarSpec | None = None
    guess_ids: bytes = b""
    max_ahead: int = 0


@message("sampler.MaskRequest/1")
class MaskRequest:
    """Asked by decode on `sampler.mask` for the sequences that took a token.

    `vocab_size` as in `CompileRequest`. `rings`: rings of shared memory that the asker has opened; masks may
    be left in these.
    """

    instance: str
    epoch: int
    model: str
    rows: tuple[MaskRow, ...]
    ended: tuple[tuple[str, int], ...] = ()
    vocab_size: int = 0
    rings: tuple[str, ...] = ()


@message("sampler.Mask/1")
class Mask:
    """The tokens that may come at completion index `position`.

    `bitmask`: int32 LE, [ceil(vocab / 32)], bit = allowed. `need_from`: the sampler lacks tokens
    from there on; `need_grammar`: it does not know the grammar; `error`: the tokens sent do not fit
    the grammar (an invariant is broken, the choice ends with an error).

    `ahead_ids` (int32 LE): allowed tokens from `position` on; `ahead_masks`: what may come behind each
    of them (`packed_masks`).

    `ring_at`: if not empty, `bitmask` and behind it `ahead_masks` lie in the reply's ring instead: offset, bytes of
    the first, bytes of the second, checksum of both (`byte_ring.checksum_of`).
    """

    request_id: str
    choice: int
    position: int
    bitmask: bytes = b""
    is_accepting: bool = False
    need_from: int | None = None
    need_grammar: bool = False
    error: str = ""
    ahead_ids: bytes = b""
    ahead_masks: bytes = b""
    ring_at: tuple[int, ...] = ()


@message("sampler.MaskReply/1")
class MaskReply:
    """One answer a row, but for rows that would hold up the others: those are to be asked again.

    `ring`: the sampler's ring of shared memory, for who is on its host; empty: it has none.
    """

    masks: tuple[Mask, ...]
    ring: str = ""
