"""What the cache has of a request's prompt, brought into the pool before the engine gets it."""

from finback.services.decode.generations import Generations
from finback.services.decode.table import Request
from finback.shared.engine.from_wire import known_tokens, store_terms
from finback.shared.engine.prefix_hold import PrefixHold
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import Cancelled


async def hold_prefix(
    host: WorkerHost, generations: Generations, request: Request, *, at_once: bool
) -> PrefixHold | None:
    """A hold for `Generations.add_first`, None where nothing is to be brought.

    `at_once`: its prompt is computed here as soon as it is added.
    Raises `Cancelled` when the request ended meanwhile; then, and on cancellation, nothing is held and
    the request is forgotten.
    """
    spec = request.spec
    tokens = known_tokens(spec.choices[0], request.prompt)
    salt = spec.cache_salt.encode()
    if not host.prefixes.may_help(tokens, salt):
        return None
    try:
        fetched = await host.prefixes.fetch(
            tokens, salt, store_terms(spec), request.parent, at_once=at_once
        )
    except BaseException:
        generations.forget(request)
        raise
    if generations.table.get(spec.request_id, spec.attempt) is request and not request.is_ended:
        return fetched.hold
    host.prefixes.release(fetched.hold)
    raise Cancelled("the request ended while its prompt was fetched", reason="fenced")
