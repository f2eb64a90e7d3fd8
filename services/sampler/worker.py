"""A worker: one process, forked with the vocabulary in memory, that compiles and computes masks.

It answers frames in order and knows nothing of the network. Whatever goes wrong in it, an endless
compilation, memory, a crash of the engine, ends with it: the service kills it and forks another.
"""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, Final

from llguidance import LLMatcher

from finback.services.sampler import frames
from finback.services.sampler.compiler import Vocabulary, compile_grammar, load_grammar
from finback.services.sampler.sequences import Sequences
from finback.services.sampler.worker_memory import die_with_parent, limit_growth
from finback.shared.clock import monotonic_s
from finback.shared.errors import InvalidRequest
from finback.shared.wire import codec
from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.sampler import Mask, MaskRequest, MaskRow

GROWTH_BYTES: Final = 512 * 2**20
COMPILE_NICENESS: Final = 10
_EXPIRE_EVERY: Final = 1024  # requests


class Worker:
    """Its grammars and sequences. One thread; the peer waits for the answers in order."""

    def __init__(self, vocabulary: Vocabulary, send: Callable[[bytes], None]) -> None:
        self._vocabulary = vocabulary
        self._send = send
        self._grammars: dict[str, LLMatcher] = {}
        self._sequences = Sequences(vocabulary)
        self._num_requests = 0
        self._is_low = False

    def take(self, kind: int, body: bytes) -> None:
        """Do what a frame says."""
        if kind == frames.MASKS:
            self._answer(codec.decode(body, MaskRequest))
            return
        told = json.loads(body)
        if kind == frames.COMPILE:
            self._send(frames.pack_json(frames.COMPILED, self._compile(told)))
        elif kind == frames.LOAD:
            self._grammars[told["grammar_id"]] = load_grammar(self._vocabulary, told["text"])
        elif kind == frames.DROP:
            self._grammars.pop(told["grammar_id"], None)

    def _compile(self, told: dict[str, Any]) -> dict[str, Any]:
        """The verdict on a grammar; a good one is kept here until it is dropped."""
        self._give_way()
        spec = GrammarSpec(
            kind=told["kind"], text=told["text"], strictness=told.get("strictness", "strict")
        )
        try:
            made = compile_grammar(self._vocabulary, spec, told["grammar_id"])
        except InvalidRequest as error:
            return {"error": error.public_message, "param": error.param, "reason": error.reason}
        except MemoryError:
            return {"error": "the grammar needs too much memory", "reason": "compile_memory"}
        except RecursionError:
            return {"error": "the grammar is nested too deeply", "reason": "depth"}
        self._grammars[made.grammar_id] = made.start
        return {
            "text": made.source.text,
            "engine": made.source.engine,
            "widened": list(made.source.widened),
            "num_bytes": made.num_bytes,
            "compile_ms": made.compile_ms,
            "load_ms": made.load_ms,
            "max_mask_ms": made.max_mask_ms,
        }

    def _give_way(self) -> None:
        """A process that compiles yields to those that compute masks."""
        if not self._is_low:
            self._is_low = True
            with contextlib.suppress(OSError):
                os.nice(COMPILE_NICENESS)

    def _answer(self, request: MaskRequest) -> None:
        now_s = monotonic_s()
        caller = (request.instance, request.epoch)
        self._sequences.end((*caller, *ended) for ended in request.ended)
        for row in request.rows:
            mask = self._mask((*caller, row.request_id, row.choice), row, now_s)
            self._send(frames.pack(frames.MASK, codec.encode(mask)))
        self._num_requests += 1
        if self._num_requests % _EXPIRE_EVERY == 0:
            self._sequences.expire(now_s)

    def _mask(self, key: tuple[str, int, str, int], row: MaskRow, now_s: float) -> Mask:
        return self._sequences.answer(key, row, self._grammars.get(row.grammar_id), now_s)


def serve(vocabulary: Vocabulary, connection: socket.socket) -> None:
    """Answer frames until the peer is gone."""
    worker = Worker(vocabulary, connection.sendall)
    connection.sendall(frames.pack_json(frames.HELLO, {"pid": os.getpid()}))
    while (frame := frames.read_frame(connection)) is not None:
        worker.take(*frame)


def run_forked(vocabulary: Vocabulary, connection: socket.socket) -> None:
    """What a forked process does; it never returns."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        limit_growth(GROWTH_BYTES)
        serve(vocabulary, connection)
        status = 0
    except (OSError, ValueError, MemoryError):
        pass  # the service is gone, or the bound on memory was reached
    finally:
        os._exit(status)
