"""The nodes of a tree are chosen by what each brings and takes, if the draft asks about them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from adaptive.control.nodes import FIRST_TRIES, NODES, NodesByCost
from adaptive.control.policy import Advice, Lead, Scope, TreeAdviser
from adaptive.types import Round

Path = Callable[[random.Random], list[float]]
Seconds = Callable[[int], float]


def sure_or_lost(chance: random.Random) -> list[float]:
    """The probabilities of a tree's nodes, likeliest first: of a text that is nearly sure, or of many unlikely ones."""
    if chance.random() < 0.5:
        return [0.95**place for place in range(1, 17)] + [0.02] * 112
    return [0.3, 0.2, 0.1, *(0.05,) * 8, *(0.01,) * 117]


def drawn(nodes: list[float], chance: random.Random) -> int:
    return sum(chance.random() < p for p in nodes)


def fading(chance: random.Random) -> list[float]:
    """The probabilities of the nodes of a text, each of which is a little less likely than the one before."""
    most = 0.4 + 0.4 * chance.random()
    return [most / (1 + 0.15 * place) for place in range(128)]


class Lived(NamedTuple):
    """300 rounds: their numbers of nodes, and the tokens per second expected of them, of which the best fixed number of
    nodes is expected to bring ``best``."""

    nodes: list[int]
    speed: float
    best: float


def live(
    policy: NodesByCost, seconds: Seconds, path: Path, truth: float = 1.0, spread: float = 0.05
) -> Iterator[Lived]:
    """Yields three times 300 rounds, in which the target follows a node with ``truth`` of its probability. They take up
    to ``spread`` longer than their seconds."""
    chance = random.Random(7)
    for _ in range(3):
        tokens, time, found = 0.0, 0.0, list[int]()
        trees = [path(chance) for _ in range(300)]
        for tree in trees:
            most, nodes = policy.next_length(1000), list[float]()
            for place, p in enumerate(tree[:most], 1):
                assert policy.adviser is not None
                if policy.adviser(place, p) is Advice.DROP:
                    break
                nodes.append(p)
            accepted = drawn([truth * p for p in nodes], chance)
            took = seconds(len(nodes)) * (1 + spread * chance.random())
            policy.observe(Round("tree" if nodes else "none", len(nodes), accepted, 0.0, took))
            tokens, time = tokens + 1 + truth * sum(nodes), time + seconds(len(nodes))
            found.append(len(nodes))
        fixed = ((1 + truth * sum(sum(tree[:n]) for tree in trees) / len(trees)) / seconds(n) for n in range(129))
        yield Lived(found, tokens / time, max(fixed))


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(lambda n: 1 + 0.001 * n, id="nearly free"),
        pytest.param(lambda n: 1 + 0.02 * n, id="dear"),
        pytest.param(lambda n: max(1.0, 0.6 + 0.03 * n), id="the first are free"),
    ],
)
def test_a_node_is_drafted_where_it_pays(seconds: Seconds) -> None:
    *_, last = live(NodesByCost(), seconds, sure_or_lost)
    assert last.speed > 0.98 * last.best


@pytest.mark.parametrize("free", [20, 50, 90, 110])
def test_nodes_that_cost_nothing_are_drafted_and_those_behind_them_where_they_pay(free: int) -> None:
    """The arithmetic of the first nodes takes no longer than the reading of the weights."""
    *_, last = live(NodesByCost(), lambda n: 1 + 0.01 * max(0, n - free), fading)
    assert last.speed > 0.98 * last.best


def test_nodes_that_were_dear_for_a_while_are_drafted_again() -> None:
    policy, node_s, seen = NodesByCost(), [0.5], list[float]()
    for _ in live(policy, lambda n: 1 + node_s[0] * n, sure_or_lost):
        seen.append(policy.chosen.size)
        node_s[0] = 0.005
    assert seen[-1] > max(8, 2 * seen[0])


@pytest.mark.parametrize("node_s", [0.005, 0.05])
def test_times_that_say_little_cost_little(node_s: float) -> None:
    """Beside other programs a round takes between once and twice its time."""
    *_, last = live(NodesByCost(), lambda n: 1 + node_s * n, sure_or_lost, spread=1.0)
    assert last.speed > 0.9 * last.best


def test_a_sure_text_gets_other_nodes_than_an_unsure_one() -> None:
    """With dear nodes, no fixed number is right for both."""
    *_, last = live(NodesByCost(), lambda n: 1 + 0.05 * n, sure_or_lost)
    assert last.speed > 1.05 * last.best
    assert sum(n <= 3 for n in last.nodes) > 0.3 * len(last.nodes)
    assert sum(8 <= n <= 16 for n in last.nodes) > 0.3 * len(last.nodes)


def test_a_draft_that_is_never_right_is_left_but_for_tries() -> None:
    *_, last = live(NodesByCost(), lambda n: 1 + 0.05 * n, sure_or_lost, truth=0.0)
    assert sum(n > 0 for n in last.nodes) < 0.1 * len(last.nodes)
    assert any(last.nodes)


@pytest.mark.parametrize(("pass_s", "sure"), [(0.001, 0.9), (0.02, 0.9), (0.1, 0.9), (0.1, 0.5)])
def test_a_tree_is_as_deep_as_a_pass_of_the_draft_pays(pass_s: float, sure: float) -> None:
    """Of each depth there is one likely node, which is followed by the next one with the probability ``sure``."""
    policy, chance, seen = NodesByCost(), random.Random(5), list[int]()
    for _ in range(200):
        most, advise = policy.next_length(1000), policy.adviser
        assert isinstance(advise, TreeAdviser)
        depth = 1
        while depth < 32 and advise.deeper(sure**depth):
            advise.passed(pass_s)
            depth += 1
        nodes = 0
        while nodes < min(depth, most) and advise(nodes + 1, sure ** (nodes + 1)) is Advice.MORE:
            nodes += 1
        seen.append(depth)
        accepted = drawn([sure**place for place in range(1, nodes + 1)], chance)
        policy.observe(Round("tree", nodes, accepted, pass_s * depth, 1.0))

    def speed(depth: int) -> float:
        return sum(sure**place for place in range(depth + 1)) / (1.0 + pass_s * depth)

    mean = sum(seen[20:]) / len(seen[20:])
    assert speed(round(mean)) > 0.97 * max(map(speed, range(1, 33)))


@pytest.mark.parametrize("true", [0.7, 1.0, 1.6])
def test_the_power_is_that_of_the_probabilities_that_come_true(true: float) -> None:
    """The draft gives three tokens 0.6, 0.3 and 0.1, whose true probabilities are these to the power ``true``."""
    policy, chance, seen = NodesByCost(), random.Random(3), []
    policy.begin(Scope("", 0.0))

    def powered(power: float) -> list[float]:
        raised = [p**power for p in (0.6, 0.3, 0.1)]
        return [p / sum(raised) for p in raised]

    for _ in range(1500):
        assert policy.next_length(1000)
        assert policy.adviser is not None
        policy.adviser(1, powered(policy.sharpness[True])[0])
        policy.observe(Round("tree", 1, int(chance.random() < powered(true)[0]), 0.0, 1.0))
        seen.append(policy.sharpness[True])
    assert sum(seen[500:]) / 1000 == pytest.approx(true, abs=0.15)
    assert policy.sharpness[False] == 1.0  # of sampled answers, which there were none of


def test_of_several_answers_each_gets_fewer_nodes() -> None:
    policy = NodesByCost()
    for _ in live(policy, lambda n: 1 + 0.02 * n, sure_or_lost):
        pass
    drafted = []
    for answers in (1, 2, 8):
        shared = policy.among(Scope("", 0.7))
        nodes = [0.9**place for place in range(1, 1 + shared.next_length(1000, answers))]
        assert shared.adviser is not None
        drafted.append(sum(shared.adviser(place, p) is Advice.MORE for place, p in enumerate(nodes, 1)))
        shared.observe(Round("tree", drafted[-1], 2, 0.0, 1.0))
    assert drafted[0] > drafted[1] > drafted[2] > 0


def test_a_lone_answer_after_shared_rounds_begins_with_the_first_trees() -> None:
    """Shared rounds do not tell what a round takes."""
    policy = NodesByCost()
    shared = policy.among(Scope("", 0.0))
    for _ in range(30):
        nodes = shared.next_length(1000, 2)
        assert shared.adviser is not None
        assert all(shared.adviser(place, 0.5) is Advice.MORE for place in range(1, nodes + 1))
        shared.observe(Round("tree", nodes, 2, 0.0, 1.0))
    assert policy.next_length(1000) in FIRST_TRIES
    assert policy.lead([0.9], 16, 100) == Lead(1, 0)  # nothing is known yet that would bring more


def test_answers_at_once_draft_no_whole_trees_where_a_node_is_not_known_to_cost_nothing() -> None:
    policy = NodesByCost()
    assert policy.next_length(1000) == 16
    assert policy.adviser is not None
    assert all(policy.adviser(place, 0.001) is Advice.MORE for place in range(1, 17))
    policy.observe(Round("tree", 16, 0, 0.0, 1.0))
    shared, drafted = policy.among(Scope("", 0.0)), 0
    for _ in range(60):
        nodes = shared.next_length(1000, 2)
        assert shared.adviser is not None
        asked = [shared.adviser(place, 0.001) for place in range(1, nodes + 1)]
        shared.observe(Round("tree" if nodes else "none", asked.count(Advice.MORE), 0, 0.0, 1.0))
        drafted += bool(nodes)
    assert 1 <= drafted <= 10


def test_the_first_trees_are_whole() -> None:
    policy = NodesByCost()
    for nodes in FIRST_TRIES:
        assert policy.next_length(1000) == nodes
        assert policy.adviser is not None
        assert all(policy.adviser(place, 1e-9) is Advice.MORE for place in range(1, nodes + 1))
        policy.observe(Round("tree", nodes, 1, 0.0, 1 + 0.01 * nodes))
    assert policy.next_length(1000) == NODES[-1]
    assert policy.adviser(1, 1e-9) is Advice.DROP
