"""The `nats` lane: bytes fetched piece by piece from the instance that offers them."""

from finback.shared.wire.codec import message


@message("lane.FetchRequest/1")
class FetchRequest:
    """Asked on the subject of a ticket; the reply's body is the raw bytes, or an error in headers.

    `generation` names the offer, as in the ticket.
    """

    generation: int
    offset: int
    length: int
