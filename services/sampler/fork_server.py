"""Holds the vocabulary and forks workers from it, so that they share its memory and start at once.

    python -m finback.services.sampler.fork_server MODEL FD

One thread, nothing imported that starts threads. On the socket FD it tells {vocab_size, eos_ids} or
{error}, then takes commands of five bytes: `F` forks a worker on the file descriptor sent along, `K`
and a pid (uint32 LE) kills one. When the socket closes it kills all workers and ends.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import struct
import sys
from typing import Final

from llguidance import LLMatcher

from finback.services.sampler.compiler import Vocabulary
from finback.services.sampler.worker import run_forked
from finback.services.sampler.worker_memory import die_with_parent, give_back_unused
from finback.shared.errors import ConfigError

COMMAND: Final = struct.Struct("<cI")


class ForkServer:
    """The commands, and the children that are not reaped yet."""

    def __init__(self, vocabulary: Vocabulary, control: socket.socket) -> None:
        self._vocabulary = vocabulary
        self._control = control
        self._children: set[int] = set()

    def run(self) -> None:
        """Until the service is gone."""
        signal.signal(signal.SIGCHLD, self._reap)
        try:
            with contextlib.suppress(ConnectionError):
                while self._take():
                    pass
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for pid in self._children:
                _kill(pid)

    def _take(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
        while data and len(data) < COMMAND.size:
            more = self._control.recv(COMMAND.size - len(data))
            data = data + more if more else b""
        if not data:
            return False
        command, pid = COMMAND.unpack(data)
        if command == b"F" and descriptors:
            self._fork(descriptors[0])
        elif command == b"K" and pid in self._children:
            _kill(pid)
        return True

    def _fork(self, descriptor: int) -> None:
        connection = socket.socket(fileno=descriptor)
        pid = os.fork()
        if pid == 0:
            self._control.close()
            run_forked(self._vocabulary, connection)
        self._children.add(pid)
        connection.close()

    def _reap(self, *_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._children.discard(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def warm_up(vocabulary: Vocabulary) -> None:
    """Build what the engine builds at a tokenizer's first mask (0.1 s, 20 MB), to be shared."""
    matcher = LLMatcher(
        vocabulary.tokenizer,
        LLMatcher.grammar_from_json_schema('{"type": "string", "pattern": "^a+$"}'),
        log_level=0,
    )
    vocabulary.bitmask(matcher)


def main(arguments: list[str]) -> int:
    """Load, tell, serve."""
    # A signal to the whole group (Ctrl-C) is the service's to answer: it drains, then closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    control = socket.socket(fileno=int(arguments[1]))
    from finback.services.sampler.model_vocabulary import load_engine_tokenizer

    try:
        vocabulary = Vocabulary(*load_engine_tokenizer(arguments[0]))
    except ConfigError as error:
        control.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return 2
    warm_up(vocabulary)
    gc.collect()
    give_back_unused()
    gc.freeze()  # so that collections in workers do not write to shared pages
    facts = {"vocab_size": vocabulary.vocab_size, "eos_ids": vocabulary.eos_ids}
    with contextlib.suppress(ConnectionError):  # the service may be gone by now
        control.sendall(json.dumps(facts).encode() + b"\n")
    ForkServer(vocabulary, control).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
