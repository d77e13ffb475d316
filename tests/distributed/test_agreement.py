"""The message about ranks that were started differently: complete where that is short, bounded where it is not."""

from __future__ import annotations

from harness.distributed.agreement import Facts, differences, disagreement, named, to_text


def text(values: dict, remedy: str = "copy it", partial: bool = False) -> str:
    return to_text([Facts(remedy, values, partial)])


def test_only_what_differs():
    one, other = (
        {"lr": 0.1, "seed": 0, "args": {"a": 1}, "old": None},
        {"lr": 0.2, "seed": 0, "args": {"a": 1}, "new": 3},
    )
    assert differences(text(one), text(one)) == {}
    assert differences(text(one), text(other)) == {
        "lr": ("copy it", "0.1", "0.2"),
        "old": ("copy it", "null", "not set"),
        "new": ("copy it", "not set", "3"),
    }
    assert list(differences(text(one, partial=True), text(other, partial=True))) == ["lr"]


def test_every_value_is_named_with_its_ranks_and_hosts():
    hosts = {0: "a", 1: "a", 2: "b", 3: "c"}
    reports = {
        2: {"lr": ("mend lr", "0.1", "0.2")},
        3: {"lr": ("mend lr", "0.1", "0.3"), "seed": ("mend seed", "0", "1")},
    }
    assert str(disagreement(hosts, reports)) == (
        "the ranks were started differently: 2 values differ\n"
        "  lr: 0.1 on ranks 0-1 (a); 0.2 on rank 2 (b); 0.3 on rank 3 (c)\n"
        "  seed: 0 on ranks 0-2 (a, b); 1 on rank 3 (c)\n"
        "  -> mend lr; mend seed"
    )


def test_a_thousand_ranks_that_differ_in_everything_fit_on_a_screen():
    hosts = {rank: f"n{rank}" for rank in range(1024)}
    ours = [{f"key{key}": f"{rank:0100}" for key in range(40)} for rank in hosts]
    reports = {rank: differences(text(ours[0]), text(ours[rank])) for rank in hosts if rank}
    message = disagreement(hosts, reports).message
    assert "40 values differ" in message
    assert "and 32 more" in message
    assert len(message) < 8_000


def test_ranks_are_named_in_runs():
    assert [named(ranks) for ranks in ([3], [0, 1, 2], [5, 1, 0])] == ["rank 3", "ranks 0-2", "ranks 0-1, 5"]
    assert len(named(range(0, 1024, 2))) < 60
