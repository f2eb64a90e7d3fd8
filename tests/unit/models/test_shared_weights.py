"""Weights that engines of one host map from one file: the same network, and no file that is not whole."""

import stat
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from finback.kernels.linear.cpu_packing import PackedMatrix
from finback.shared.models import shared_weights as sharing
from finback.shared.models.config import ModelConfig
from finback.shared.models.cpu_weights import CpuWeights, load_cpu_weights
from finback.shared.models.packed_file import read
from finback.shared.models.random_weights import RandomWeights

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=70,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    max_model_len=64,
    tie_word_embeddings=False,
    qk_norm=True,
)
PACK = partial(load_cpu_weights, CONFIG, RandomWeights(CONFIG, seed=3))


def bytes_of(item: PackedMatrix | torch.Tensor) -> list[bytes]:
    """What a matrix's tiles hold, tile after tile, and its kinds; or a norm's values."""
    if isinstance(item, torch.Tensor):
        return [item.numpy().tobytes()]
    found = [item.tiles[:, 1].tobytes(), str((item.num_columns, item.num_k)).encode()]
    size = item.num_bytes // len(item.tiles) // 64 * 64
    for address, _ in item.tiles:
        owner = next(o for o in item.owners if 0 <= address - o.ctypes.data <= o.nbytes - size)
        at = int(address) - owner.ctypes.data
        found.append(owner[at : at + size].tobytes())
    return found


def contents(weights: CpuWeights) -> list[list[bytes]]:
    layers = [layer[column] for layer in weights.layers for column in sorted(layer)]
    return [bytes_of(i) for i in (weights.embedding, weights.head, weights.final_norm, *layers)]


def only_file(folder: Path) -> Path:
    [path] = folder.glob("*.packed*")
    return path


def test_mapped_weights_are_the_packed_ones(tmp_path: Path) -> None:
    wanted = contents(PACK())
    assert contents(sharing.shared_weights(tmp_path / "w", "model", PACK)) == wanted
    path = only_file(tmp_path / "w")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    def never() -> CpuWeights:
        raise AssertionError("they are there already")

    mapped = sharing.shared_weights(tmp_path / "w", "model", never)
    assert contents(mapped) == wanted
    base = mapped.embedding.owners[0].base
    assert base is not None
    assert mapped.head.owners[0].base is base  # one mapping for all


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    config = ModelConfig(
        **{f: getattr(CONFIG, f) for f in CONFIG.__slots__} | {"tie_word_embeddings": True}
    )
    pack = partial(load_cpu_weights, config, RandomWeights(config))
    found = sharing.shared_weights(tmp_path, "model", pack)
    assert found.head is found.embedding
    assert found.num_bytes >= pack().num_bytes


@pytest.mark.parametrize("damage", ["cut", "bit", "header", "empty", "magic"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    sharing.shared_weights(tmp_path, "model", PACK)
    path = only_file(tmp_path)
    raw = bytearray(path.read_bytes())
    if damage == "bit":
        raw[len(raw) // 2] ^= 1
    elif damage == "header":
        raw[40:60] = b"\xff" * 20
    elif damage == "magic":
        raw[0] ^= 1
    path.write_bytes(bytes({"cut": raw[:-1], "empty": bytearray()}.get(damage, raw)))
    assert read(path) is None
    wanted = contents(PACK())
    assert contents(sharing.shared_weights(tmp_path, "model", PACK)) == wanted
    assert read(path) is not None


def test_a_folder_keeps_one_file(tmp_path: Path) -> None:
    sharing.shared_weights(tmp_path, "model", PACK)
    first = only_file(tmp_path)
    (tmp_path / "left.packed.tmp").write_bytes(b"of one that was killed")
    sharing.shared_weights(tmp_path, "another", PACK)
    assert only_file(tmp_path) != first


def test_a_folder_that_cannot_be_used_leaves_weights_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = sharing.shared_weights(tmp_path / "file" / "w", "model", PACK)
    assert contents(found) == contents(PACK())


def test_of_engines_that_start_at_once_one_packs(tmp_path: Path) -> None:
    """Threads stand for them: a lock belongs to whoever opened the file, not to the process."""
    made: list[CpuWeights] = []

    def pack() -> CpuWeights:
        time.sleep(0.05)
        made.append(PACK())
        return made[-1]

    with ThreadPoolExecutor(4) as pool:
        ways = [pool.submit(sharing.shared_weights, tmp_path, "model", pack) for _ in range(4)]
        found = [contents(way.result(60)) for way in ways]
    assert len(made) == 1
    assert found == [contents(made[0])] * 4
