"""The cache of grammars against a plain list, and refusals."""

from hypothesis import given
from hypothesis import strategies as st

from finback.services.sampler import catalogue as module
from finback.services.sampler.catalogue import Catalogue, Entry
from finback.services.sampler.policy import Measured
from finback.shared.errors import InvalidRequest

BUDGET = 100


def entry(name: str, num_bytes: int) -> Entry:
    return Entry(
        grammar_id=name,
        kind="regex",
        engine="e",
        engine_text="",
        widened=(),
        measured=Measured(compile_ms=1, load_ms=1, max_mask_ms=0.1, num_bytes=num_bytes),
    )


STEPS = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 120), st.booleans()))


@given(STEPS)
def test_least_recently_used_goes_first_within_the_budget(
    steps: list[tuple[str, int, bool]],
) -> None:
    evicted: list[str] = []
    catalogue = Catalogue(lambda gone: evicted.append(gone.grammar_id), cache_bytes=BUDGET)
    twin: list[tuple[str, int]] = []
    gone: list[str] = []
    for name, size, is_new in steps:
        held = next((item for item in twin if item[0] == name), None)
        if is_new:
            catalogue.keep(entry(name, size))
            twin = [item for item in twin if item[0] != name] + [(name, size)]
            while sum(item[1] for item in twin) > BUDGET and len(twin) > 1:
                gone.append(twin.pop(0)[0])
        else:
            found = catalogue.find(name)
            assert (found is None) == (held is None)
            if held:
                twin = [item for item in twin if item[0] != name] + [held]
        assert catalogue.num_bytes == sum(item[1] for item in twin)
        assert len(catalogue) == len(twin)
        assert evicted == gone


def test_a_slow_grammar_gets_its_own_worker() -> None:
    catalogue = Catalogue(lambda _: None)
    catalogue.keep(entry("a", 10))
    assert catalogue.mark_slow("b") is None
    slow = catalogue.mark_slow("a")
    assert slow is not None and slow.placement == "own"
    found = catalogue.find("a")
    assert found is not None and found.placement == "own"


def test_refusals_are_remembered_and_bounded() -> None:
    catalogue = Catalogue(lambda _: None)
    catalogue.keep(entry("a", 10))
    catalogue.refuse("a", InvalidRequest("no", param="p", reason="r"))
    assert catalogue.find("a") is None and catalogue.num_bytes == 0
    known = catalogue.refusal("a")
    assert known is not None and (known.param, known.reason) == ("p", "r")
    assert known is not catalogue.refusal("a")  # raised by several, so no two share a traceback
    for index in range(module.MAX_REFUSED):
        catalogue.refuse(f"x{index}", InvalidRequest("no"))
    assert catalogue.refusal("a") is None
