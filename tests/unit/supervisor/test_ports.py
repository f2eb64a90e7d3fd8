"""Ports that are free, taken, or not ours."""

import socket

import pytest

from finback.services.supervisor import ports
from finback.shared.errors import ConfigError


def test_a_free_one_is_found() -> None:
    port = ports.choose("127.0.0.1", 0, "HTTP", "--http-port")
    assert ports.choose("127.0.0.1", port, "HTTP", "--http-port") == port


def test_a_taken_one_is_named_with_the_way_out() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"HTTP port {taken} on 127.0.0.1 is taken.*--http-port"
        ):
            ports.choose("127.0.0.1", taken, "HTTP", "--http-port")


def test_an_address_that_is_not_this_machine(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        ports.choose("203.0.113.7", 0, "HTTP", "--http-port")
