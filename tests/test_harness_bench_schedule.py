"""The order of the timed runs, the ring of buffers with its contents, and the runs whose answers are looked at."""

import pytest

from assay.harness.bench.schedule import CHECKED, Content, Schedule, ring_size, schedule_for

MIB = 1 << 20


def test_a_round_goes_forwards_and_backwards() -> None:
    schedule = Schedule(rounds=3, ring=2, seed=0)
    orders = ["".join(schedule.order("abc", at)) for at in range(8)]
    assert orders == ["abc", "cba", "bca", "acb", "cab", "bac", "abc", "cba"]


def test_an_address_holds_other_contents_each_time_the_ring_comes_round() -> None:
    schedule = Schedule(rounds=4, ring=2, seed=0)
    contents = [schedule.content(at) for at in range(8)]
    assert contents[:4] == [Content(entry=e, version=v) for e, v in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert contents[4:] == contents[:4]


@pytest.mark.parametrize(
    ("entry_bytes", "cache_bytes", "ring"),
    [(200 * MIB, 60 * MIB, 2), (90 * MIB, 60 * MIB, 2), (89 * MIB, 60 * MIB, 3), (MIB, 60 * MIB, 180), (0, 0, 2)],
)
def test_the_ring_is_three_caches_long_and_two_sets_at_least(entry_bytes: int, cache_bytes: int, ring: int) -> None:
    assert ring_size(entry_bytes, cache_bytes) == ring


def test_a_long_ring_gets_the_rounds_in_which_it_comes_round_with_both_contents() -> None:
    schedule = schedule_for(MIB, 60 * MIB, seed=0, rounds=20)
    assert (schedule.ring, schedule.rounds, schedule.iterations) == (180, 180, 360)
    assert len({schedule.content(at) for at in range(schedule.iterations)}) == 360
    assert schedule_for(200 * MIB, 60 * MIB, seed=0, rounds=20).rounds == 20


def test_fewer_runs_than_the_ring_is_long_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 times on each of 7 sets of buffers, got 12 runs"):
        Schedule(rounds=6, ring=7, seed=0)
    with pytest.raises(ValueError, match="rounds must be at least 2"):
        Schedule(rounds=1, ring=1, seed=0)


def test_the_looked_at_runs_are_drawn_from_the_seed_and_cover_both_contents() -> None:
    drawn = [Schedule(rounds=20, ring=2, seed=seed).checked for seed in range(20)]
    assert all(len(checked) == CHECKED for checked in drawn)
    assert len(set(drawn)) == 20
    for seed, checked in enumerate(drawn):
        schedule = Schedule(rounds=20, ring=2, seed=seed)
        assert schedule.checked == checked
        assert {schedule.content(at).version for at in checked} == {0, 1}
        assert schedule.checked_contents == sorted(
            {schedule.content(at) for at in checked}, key=lambda one: (one.entry, one.version)
        )
