"""Own placements, and which conversation was where."""

from hypothesis import given
from hypothesis import strategies as st

from finback.services.router import notes as notes_of
from finback.services.router.notes import PlacementNotes, depths
from finback.services.router.sessions import SessionTable

Prompt = tuple[int, ...]


def keys(prompt: Prompt) -> list[int]:
    """Chained: a key names the whole prefix."""
    return [hash(prompt[: i + 1]) & (2**60 - 1) for i in range(len(prompt))]


def note(book: PlacementNotes, prompt: list[int], name: str, until_s: float, now_s: float) -> None:
    book.note(prompt, book.look(prompt), [(name, 1)], until_s, now_s)


def runs(book: PlacementNotes, prompt: list[int], now_s: float) -> dict[tuple[str, int], int]:
    return depths(book.look(prompt), now_s)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple),
            st.sampled_from("abc"),
            st.integers(1, 9),
        ),
        max_size=12,
    ),
    st.lists(st.integers(0, 1), max_size=6).map(tuple),
)
def test_runs_are_the_longest_common_prefix_with_what_was_placed(
    placed: list[tuple[Prompt, str, int]], prompt: Prompt
) -> None:
    book = PlacementNotes()
    until: dict[tuple[Prompt, str], int] = {}
    for now_s, (noted, instance, life) in enumerate(placed):
        note(book, keys(noted), instance, now_s + life, now_s)
        for depth in range(1, len(noted) + 1):
            until[noted[:depth], instance] = now_s + life
    now_s = len(placed)
    expected: dict[tuple[str, int], int] = {}
    for (prefix, instance), until_s in until.items():
        if until_s > now_s and prompt[: len(prefix)] == prefix:
            expected[instance, 1] = max(expected.get((instance, 1), 0), len(prefix))
    assert runs(book, keys(prompt), now_s) == expected


def test_long_prompts_are_noted_by_every_eighth_block() -> None:
    book = PlacementNotes()
    prompt = list(range(1000, 1200))
    note(book, prompt, "a", 10.0, 0.0)
    assert len(book) == 32 + 21
    assert runs(book, prompt, 1.0) == {("a", 1): 200}
    assert runs(book, [*prompt[:100], 5], 1.0) == {("a", 1): 96}


def test_notes_are_few_and_do_not_stay() -> None:
    book = PlacementNotes(max_keys=10)
    for start in range(0, 100, 5):
        note(book, list(range(start + 1, start + 6)), "a", 1e9, 0.0)
    assert len(book) <= 20
    note(book, [1000], "a", 1e9, notes_of.GENERATION_S + 1)
    note(book, [1001], "a", 1e9, 2 * notes_of.GENERATION_S + 2)
    assert runs(book, [96], 0.0) == {} and runs(book, [1000], 0.0) == {("a", 1): 1}


def test_a_conversation_is_remembered_for_a_while_and_by_tenant() -> None:
    table = SessionTable(life_s=10, max_sessions=2)
    table.note("t", "s", "a", 1, 0.0)
    assert table.find("t", "s", 5.0) == ("a", 1)
    assert table.find("u", "s", 5.0) is None and table.find("t", "", 5.0) is None
    table.note("t", "s", "b", 2, 6.0)
    assert table.find("t", "s", 15.0) == ("b", 2)
    assert table.find("t", "s", 16.5) is None
    for number in range(3):
        table.note("t", str(number), "a", 1, 20.0)
    assert len(table) == 2
    table.note("t", "", "a", 1, 20.0)
    table.sweep(40.0)
    assert len(table) == 0
