"""The message about ranks that were started differently: complete where that is short, bounded where it is not."""

from __future__ import annotations

from harness.distributed.agreement import Facts, disagreement, rank_names


def disagreement_of(ranks: list[dict], hosts: list[str], partial: bool = False):
    """The error if the ranks have these values, by name."""
    facts = {}
    for rank, values in enumerate(ranks):
        remedies = dict.fromkeys(f"mend {name}" for each in ranks for name in each)
        facts[rank] = [
            Facts(remedy, {name: value for name, value in values.items() if f"mend {name}" == remedy}, partial)
            for remedy in remedies
        ]
    return disagreement(facts, dict(enumerate(hosts)))


def test_only_what_differs():
    one, other = (
        {"lr": 0.1, "seed": 0, "args": {"a": 1}, "old": None},
        {"lr": 0.2, "seed": 0, "args": {"a": 1}, "new": 3},
    )
    assert disagreement_of([one, one], ["a", "b"]) is None
    assert disagreement_of([one, other], ["a", "b"]).message.splitlines()[1:] == [
        "  lr: 0.1 on rank 0 (a); 0.2 on rank 1 (b)",
        "  old: null on rank 0 (a); not set on rank 1 (b)",
        "  new: not set on rank 0 (a); 3 on rank 1 (b)",
    ]
    assert disagreement_of([one, other], ["a", "b"], partial=True).message.splitlines()[1:] == [
        "  lr: 0.1 on rank 0 (a); 0.2 on rank 1 (b)",
    ]


def test_groups_with_the_same_remedy_are_all_compared():
    facts = {rank: [Facts("copy it", {"a": rank}), Facts("copy it", {"b": 0})] for rank in range(2)}
    assert "  a: 0 on rank 0 (x); 1 on rank 1 (x)" in disagreement(facts, {0: "x", 1: "x"}).message


def test_every_value_is_named_with_its_ranks_and_hosts():
    values = [(0.1, 0), (0.1, 0), (0.2, 0), (0.3, 1)]
    assert str(disagreement_of([{"lr": lr, "seed": seed} for lr, seed in values], ["a", "a", "b", "c"])) == (
        "the ranks were started differently: 2 values differ\n"
        "  lr: 0.1 on ranks 0-1 (a); 0.2 on rank 2 (b); 0.3 on rank 3 (c)\n"
        "  seed: 0 on ranks 0-2 (a, b); 1 on rank 3 (c)\n"
        "  -> mend lr; mend seed"
    )


def test_a_thousand_ranks_that_differ_in_everything_fit_on_a_screen():
    ranks = range(1024)
    facts = {rank: [Facts("copy it", {f"key{key}": f"{rank:0100}" for key in range(40)})] for rank in ranks}
    message = disagreement(facts, {rank: f"n{rank}" for rank in ranks}).message
    assert "40 values differ" in message
    assert "and 32 more" in message
    assert len(message) < 8_000


def test_ranks_are_named_in_runs():
    assert [rank_names(ranks) for ranks in ([3], [0, 1, 2], [5, 1, 0])] == ["rank 3", "ranks 0-2", "ranks 0-1, 5"]
    assert len(rank_names(range(0, 1024, 2))) < 60
    assert rank_names([]) == "ranks "  # all have come while the message is written
