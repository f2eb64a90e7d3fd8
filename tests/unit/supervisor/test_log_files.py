"""Logs that several writers append to while they are rotated."""

import os
from pathlib import Path

from finback.services.supervisor import log_files


def test_rotation_keeps_one_older_file_and_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    fd = log_files.open_for_append(path)
    os.write(fd, b"x" * 100 + b"\n")
    assert not log_files.rotate(path, max_bytes=1000)
    assert log_files.rotate(path, max_bytes=50)
    os.write(fd, b"after\n")
    os.close(fd)
    assert path.read_text() == "after\n"
    assert (tmp_path / "a.log.1").read_text() == "x" * 100 + "\n"


def test_the_last_line_is_the_last_that_says_something(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert log_files.last_line(path) == ""
    path.write_text("first\nthe reason\n\n  \n")
    assert log_files.last_line(path) == "the reason"


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("a" * 1000 + "end")
    assert log_files.tail(path, 5) == "aaend"
