"""Which processes a stack has."""

import pytest

from finback.services.supervisor import topology


@pytest.mark.parametrize(
    ("asked", "cores", "expected"),
    [
        ("auto", 2, "cohost"),
        ("auto", 3, "cohost"),
        ("auto", 4, "separate"),
        ("separate", 1, "separate"),
        ("cohost", 64, "cohost"),
    ],
)
def test_layout(asked: str, cores: int, expected: str) -> None:
    assert topology.choose_layout(asked, cores) == expected


@pytest.mark.parametrize("layout", ["cohost", "separate"])
def test_every_role_has_exactly_one_process(layout: topology.Layout) -> None:
    specs = topology.plan(layout, 2)
    roles = [role for spec in specs for role in spec.roles]
    assert sorted(roles) == sorted(topology.ROLES)
    assert len({spec.name for spec in specs}) == len(specs)


def test_torch_free_services_get_one_thread_and_engines_theirs() -> None:
    for spec in topology.plan("separate", 6):
        env = topology.thread_environment(spec)
        assert env["OMP_NUM_THREADS"] == ("6" if spec.is_engine else "1")
        assert env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert topology.plan("separate", 6, 2)[0].num_threads == 2


@pytest.mark.parametrize("layout", ["cohost", "separate"])
def test_further_decode_processes_have_names_of_their_own(layout: topology.Layout) -> None:
    specs = topology.plan(layout, 2, num_decodes=3)
    decodes = [spec for spec in specs if "decode" in spec.roles]
    assert [spec.name for spec in decodes] == ["decode", "decode2", "decode3"]
    assert {spec.user for spec in decodes} == {"decode"}
    assert len({spec.roles for spec in decodes}) == 1
