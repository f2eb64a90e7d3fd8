"""The choice of CPU kernels, against a list of what each processor has."""

from itertools import combinations

import pytest

from finback.kernels import cpu_features
from finback.kernels.cpu_features import SETS, choose, missing_features

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512vl", "avx512bw", "avx512dq"}
AMX = AVX512 | {"amx_tile", "amx_bf16"}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (frozenset[str](), "portable"),
        (frozenset({"sse2", "avx"}), "portable"),
        (AVX2, "avx2"),
        (AVX2 | {"avx512f"}, "avx2"),
        (AVX512 | {"amx_tile"}, "avx512"),
        (AVX512, "avx512"),
        (AMX, "amx"),
    ],
)
def test_the_best_that_runs_is_chosen(flags: frozenset[str], name: str) -> None:
    assert choose(flags).name == name


def test_every_subset_of_features_gets_the_highest_set_it_covers() -> None:
    needs = {"portable": frozenset[str](), "avx2": AVX2, "avx512": AVX512, "amx": AMX}
    pieces = sorted(AMX - {"fma", "f16c", "avx512vl", "avx512bw"})
    for size in range(len(pieces) + 1):
        for lost in combinations(pieces, size):
            flags = AMX - set(lost)
            wanted = [name for name, needed in needs.items() if needed <= flags][-1]
            assert choose(flags).name == wanted


def test_a_lower_set_can_be_asked_for() -> None:
    for item in SETS:
        assert choose(AMX, item.name) == item


def test_what_cannot_run_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="lacks amx_bf16, amx_tile; use auto"):
        choose(AVX512, "amx")
    with pytest.raises(ValueError, match="is 'sse9'; use auto, portable, avx2"):
        choose(AMX, "sse9")
    assert missing_features("avx512", AVX2) == sorted(AVX512 - AVX2)


def test_lanes_override_turns_wide_products_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_features.LANES_VARIABLE, "8")
    monkeypatch.setattr(cpu_features, "usable_flags", lambda: AMX)
    found = cpu_features.chosen.__wrapped__()
    assert (found.lanes, found.wide) == (8, "none")
    assert found.name != "amx"
