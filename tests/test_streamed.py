"""A target whose layers are read from disk computes the same as in memory, and defects of its file are reported."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from conftest import BUNDLED, Command, save_random_pair
from transformers import AutoModelForCausalLM

from adaptive.assistant import length_policy
from adaptive.control.goodput import GoodputLength
from adaptive.control.nodes import NODES, NodesByCost
from adaptive.control.policy import Lead, Scope
from adaptive.engines.cpu.kernels import library
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.load import Forward, Source, forward_of, load_engine
from adaptive.engines.protocol import ExtendCall
from adaptive.engines.streamed.engine import BUFFERS, kept_layers
from adaptive.engines.streamed.packed import PROJECTION, PackedFile, Section, manifest
from adaptive.errors import AdaptiveError
from adaptive.measure import drafts_for_disk, makes_trees
from adaptive.pair import load_pair
from adaptive.settings import Quantisation, load_settings, memory_bytes
from adaptive.types import Round

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels were not built")

TARGET = BUNDLED / "target"
# Memory limits: the bundled target takes 60 MB in float32 and 18 in int8, so one or two of 16 layers stay.
LITTLE: dict[Quantisation, str] = {"none": "20MB", "int8": "8MB"}


def streamed(target: Path, memory: str, quantize: Quantisation = "none") -> TransformersEngine:
    settings = load_settings({"memory": memory, "dtype": "float32", "quantize": quantize})
    engine = load_engine(Source("it", target, quantize), settings, "cpu", lambda share: None)
    assert isinstance(engine, TransformersEngine)
    assert forward_of(engine) is Forward.STREAMED
    return engine


def packed_in(home: Path) -> Path:
    (folder,) = (home / "packed").iterdir()
    return folder


def logits_of(engine: TransformersEngine) -> list[torch.Tensor]:
    """Logits after a prompt in several passes, a step, a tree whose path is kept, and a pass over two texts."""
    one, other = engine.sequence(), engine.sequence()
    found = [one.extend([(7 * i) % 400 + 3 for i in range(700)], 2), one.extend([11], 1)]
    found.append(one.extend([5, 6, 7, 8], 4, [-1, -1, 0, 2]))
    found = [logits.clone() for logits in found]
    one.keep([0, 2, 3])
    found += [
        logits.clone() for logits in engine.extend_together([ExtendCall(one, [9], 1), ExtendCall(other, [4, 5], 2)])
    ]
    return found


@pytest.mark.parametrize("quantize", LITTLE)
def test_logits_are_those_of_the_target_in_memory_bit_for_bit(quantize: Quantisation) -> None:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    resident = TransformersEngine(model, int8=quantize == "int8")
    engine = streamed(TARGET, LITTLE[quantize], quantize)
    for got, right in zip(logits_of(engine), logits_of(resident), strict=True):
        assert torch.equal(got, right)


def test_biases_and_a_file_that_is_there_already(tmp_path: Path, own_home: Path) -> None:
    target, _ = save_random_pair(tmp_path, "qwen2")
    resident = TransformersEngine(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32))
    first = logits_of(streamed(target, "2.5MB"))
    written = packed_in(own_home).stat().st_mtime_ns
    again = logits_of(streamed(target, "2.5MB"))
    assert packed_in(own_home).stat().st_mtime_ns == written
    for got, same, right in zip(first, again, logits_of(resident), strict=True):
        assert torch.equal(got, right)
        assert torch.equal(same, right)


@pytest.mark.thorough
def test_answers_are_those_of_the_target_in_memory_with_chains_and_trees(adaptive: Command) -> None:
    def say(*options: str) -> list[int]:
        given = ("generate", "The old", "--json", "--temperature", "0", "--dtype", "float32", "--max-new-tokens", "40")
        status, out, _ = adaptive(*given, "--no-record", *options)
        assert status == 0
        tokens: list[int] = json.loads(out)["tokens"]
        return tokens

    right = say("--draft-length", "0")
    for length in ("auto", "5", "tree:24"):
        assert say("--memory", "20MB", "--draft-length", length) == right


def test_layers_that_stay_are_as_many_as_fit_and_spread_among_the_others() -> None:
    assert kept_layers([10] * 8, 80) == frozenset(range(8))
    assert kept_layers([10] * 8, 79) == frozenset({1, 3, 4, 6, 7})
    assert kept_layers([10] * 8, 10 * BUFFERS) == frozenset()
    assert kept_layers([10] * 8, 10 * BUFFERS - 1) is None


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def change(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 1]))


def unreadable(file: Path) -> None:
    (file.parent / "manifest.json").write_text("{")


def elsewhere(file: Path) -> None:
    """The manifest says that a part of a linear layer lies where another one does."""
    place = file.parent / "manifest.json"
    said = json.loads(place.read_text())
    next(iter(said["sections"]["0"]["linears"].values()))["parts"][0] += 64
    place.write_text(json.dumps(said))


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A folder of packed weights, of one section without linear layers."""
    section = Section(0, 4096, hashlib.sha256(bytes(4096)).hexdigest())
    (tmp_path / "manifest.json").write_text(manifest({PROJECTION: section}))
    (tmp_path / "weights.bin").write_bytes(bytes(4096))
    return tmp_path


def test_a_system_without_direct_reads_reads_the_file_all_the_same(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    file = PackedFile(packed)
    file.read(file.sections[-1], mmap.mmap(-1, 4096))
    file.close()


def test_a_file_of_another_size_is_not_kept_open(packed: Path) -> None:
    (packed / "weights.bin").write_bytes(bytes(5))
    before = psutil.Process().num_fds()
    with pytest.raises(AdaptiveError, match="5 bytes instead of 4096"):
        PackedFile(packed)
    assert psutil.Process().num_fds() == before


@pytest.mark.thorough(but="cut")
@pytest.mark.parametrize("damage", [cut, change, unreadable, elsewhere])
def test_a_damaged_file_is_one_line_and_mended_by_the_command_it_names(
    damage: Callable[[Path], None], own_home: Path, adaptive: Command
) -> None:
    streamed(TARGET, "20MB")
    damage(packed_in(own_home) / "weights.bin")
    run = ("generate", "Hi", "--memory", "20MB", "--dtype", "float32", "--max-new-tokens", "2")
    status, _, said = adaptive(*run)
    assert status == 2
    assert said.count("\n") == 1
    command = said.split("`")[1].split()
    assert command[:3] == ["adaptive", "packed", "delete"]
    assert adaptive(*command[1:])[0] == 0
    assert adaptive(*run)[0] == 0


def test_a_file_that_is_cut_while_it_is_read_ends_the_pass_with_an_error(own_home: Path) -> None:
    engine = streamed(TARGET, "20MB")
    sequence = engine.sequence()
    sequence.extend([3, 4], 1)
    os.truncate(packed_in(own_home) / "weights.bin", 4096)
    with pytest.raises(AdaptiveError, match="can no longer be read: it is shorter"):
        sequence.extend([5], 1)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--memory", "12MB", "--dtype", "float32"), "at least 14.9MB"),
        (("--memory", "much"), "a size such as 4GB"),
        (("--memory", "1GB", "--dtype", "float64"), "one native call"),
        (("--memory", "1GB", "--quantize", "nf4"), "nf4"),
    ],
)
def test_what_cannot_be_streamed_is_one_line(options: tuple[str, ...], what: str, adaptive: Command) -> None:
    status, _, said = adaptive("generate", "Hi", *options)
    assert status == 2
    assert said.count("\n") == 1
    assert what in said


@pytest.mark.thorough
def test_packed_weights_are_listed_and_found_by_doctor(own_home: Path, adaptive: Command) -> None:
    streamed(TARGET, "20MB")
    name = packed_in(own_home).name
    assert name in adaptive("packed", "list")[1]
    (one,) = json.loads(adaptive("packed", "list", "--json")[1])
    assert (one["name"], one["unfinished"]) == (name, False)
    assert one["bytes"] > 1_000_000
    assert name in adaptive("doctor", "--json", "--memory", "20MB", "--dtype", "float32")[1]
    assert adaptive("packed", "delete", "--all")[0] == 0
    assert "there are no packed weights" in adaptive("packed", "list")[1]


def test_sizes() -> None:
    assert [memory_bytes(said) for said in ("4GB", "1.5 GiB", "800mb")] == [4 * 10**9, 3 * 2**29, 8 * 10**8]


@pytest.mark.thorough
def test_auto_drafts_trees_for_a_streamed_target_and_chains_for_one_in_memory() -> None:
    for memory, kind in ((None, GoodputLength), ("20MB", NodesByCost)):
        settings = load_settings({"memory": memory, "dtype": "float32"})
        pair = load_pair(settings)
        policy = length_policy(settings, disk=drafts_for_disk(pair), trees=makes_trees(pair))
        assert type(policy) is kind
        assert policy.tree is (kind is NodesByCost)


def rounds(policy: NodesByCost, node_s: float, gain: float, count: int = 150) -> list[int]:
    """The nodes chosen per round, where a round takes 1 s plus ``node_s`` per node, and doubling the nodes adds
    ``gain`` accepted tokens."""
    found = []
    for _ in range(count):
        n = policy.next_length(1000)
        found.append(n)
        accepted = round(gain * n.bit_length())
        policy.observe(Round("tree", n, min(accepted, n), 0.0, 1.0 + node_s * n))
    return found[count // 2 :]


@pytest.mark.parametrize(
    ("node_s", "gain", "best"), [(0.0, 1.0, NODES[-1]), (0.01, 1.0, 32), (0.2, 1.0, 4), (0.2, 0.0, 0)]
)
def test_as_many_nodes_as_pay_are_drafted(node_s: float, gain: float, best: int) -> None:
    chosen = rounds(NodesByCost(), node_s, gain)
    assert max(set(chosen), key=chosen.count) == best
    assert chosen.count(best) > 0.8 * len(chosen)


def test_a_disturbed_round_changes_little() -> None:
    policy = NodesByCost()
    before = rounds(policy, 0.001, 1.0)
    policy.observe(Round("tree", 128, 8, 0.0, 60.0))
    assert set(rounds(policy, 0.001, 1.0, 60)) == set(before)


def test_a_machine_that_has_become_slower_is_noticed() -> None:
    policy = NodesByCost()
    assert min(rounds(policy, 0.0, 1.0)) >= 64
    assert max(rounds(policy, 0.2, 1.0)[-30:]) <= 16


def test_answers_at_once_draft_trees_before_any_lone_round() -> None:
    policy = NodesByCost()
    beside = policy.among(Scope("", 0.0))
    lengths = []
    for _ in range(4):
        lengths.append(beside.next_length(1000, 2))
        beside.observe(Round("tree", lengths[-1], 3, 0.0, 1.0))
    assert lengths == [8, 32, 8, 16]


def test_earlier_text_is_proposed_where_it_brings_more_than_a_tree() -> None:
    policy = NodesByCost()
    rounds(policy, 0.0, 1.0)  # some 8 accepted tokens
    assert policy.lead([0.9] * 4, 128, 100) == Lead(0, 128)
    assert policy.lead([0.95] * 16, 128, 100) == Lead(16, 0)
    assert policy.lead([0.95] * 16, 128, 3) == Lead(0, 128)
    assert policy.lead([0.5], 0, 100) == Lead(1, 0)  # the draft cannot be used
    assert not policy.worth_looking(behind=True)
    accepted = list(policy.accepted)
    policy.observe_free(Round("history", 16, 0, 0.0, 1.0))
    assert policy.accepted == accepted  # it says nothing of trees


def test_of_earlier_text_as_much_is_proposed_as_pays() -> None:
    policy = NodesByCost()
    for count in (0, 16, 0, 4):  # a token more takes a tenth of a pass
        policy.observe_free(Round("history", count, 0, 0.0, 1.0 + 0.1 * count))
    assert policy.lead([0.9, 0.8, 0.05, 0.01], 0, 100) == Lead(2, 0)
    assert policy.lead([0.12, 0.01], 0, 100) == Lead(1, 0)
    assert policy.lead([0.08, 0.01], 0, 100) == Lead(0, 0)


def test_answers_at_once_try_trees_again_when_none_paid() -> None:
    """Nobody may be alone for long, and the text or the draft may change."""
    policy = NodesByCost()
    for _ in range(60):
        length = policy.next_length(1000)
        policy.observe(Round("tree" if length else "none", length, 0, 0.0, 1.0 + 0.1 * length))
    assert policy._best() == 0
    beside, lengths = policy.among(Scope("", 0.0)), []
    for _ in range(30):
        lengths.append(beside.next_length(1000, 20))
        beside.observe(Round("tree" if lengths[-1] else "none", lengths[-1], 0, 0.0, 1.0))
    assert 1 <= sum(length > 0 for length in lengths) <= 4
