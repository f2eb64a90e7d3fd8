"""What `finback doctor` says of a model."""

from pathlib import Path

from finback.services.supervisor import checks
from finback.shared.config import StackConfig
from support.windowed import windowed_folder


def test_a_model_s_line_tells_what_it_keeps(tmp_path: Path) -> None:
    folder = windowed_folder(tmp_path / "windowed")
    found = checks.model(StackConfig(model=str(folder), model_name="w", kv_dtype="f32"))
    assert (found.level, found.found) == (
        "ok",
        (
            "w: qwen3, 4 layers, up to 512 tokens; "
            # One layer of two heads in blocks; three layers' five rows and a header as state.
            "KV 0.5 KiB a token, state 7.5 KiB a sequence as f32"
        ),
    )
    assert checks.model(StackConfig(model=str(tmp_path / "nothing"))).level == "missing"
