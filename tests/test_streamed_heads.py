"""A head on a target whose layers are on disk drafts as for the same target in memory, and is grown there."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from conftest import BUNDLED, Command, save_head, save_random_pair
from foreign_heads import save_eagle, save_eagle_target, save_with_mtp
from safetensors.torch import load_file, save_file
from test_batch import alone as one_by_one
from test_batch import together
from test_head_lossless import alone, said, settings_of

from adaptive.answering import Question
from adaptive.assistant import Assistant, encode_chat, length_policy
from adaptive.control.lengths import LENGTHS, LengthByCost
from adaptive.control.nodes import NodesByCost
from adaptive.control.policy import FixedLength
from adaptive.engines.cpu.kernels import library
from adaptive.engines.cpu.weights import fast_int8
from adaptive.engines.head.engine import HeadEngine
from adaptive.engines.head.module import VOCABULARY, WEIGHTS
from adaptive.engines.load import Forward, forward_of
from adaptive.measure import drafts_for_disk, makes_trees
from adaptive.pair import Pair, grows_on, load_pair
from adaptive.settings import load_settings
from adaptive.types import Message, Round, SamplingParams, StopParams

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels were not built")

# Of the bundled target's 60 MB, and of the random one's.
LITTLE = {"tied": "40MB", "untied": "2.5MB"}
STOP = StopParams(40, ignore_eos=True)
PROMPTS = ["Write a function that adds two numbers.", "What is 12 times 3?"]


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The bundled target, or one of random weights whose vocabulary projection is not its embedding."""
    if request.param == "tied":
        return BUNDLED / "target"
    folder, _ = save_random_pair(tmp_path, "qwen2")
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    torch.manual_seed(5)
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding + 0.1 * embedding.std() * torch.randn_like(embedding)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


def engine_of(pair: Pair) -> HeadEngine:
    assert isinstance(pair.draft, HeadEngine)
    return pair.draft


def rounds(pair: Pair) -> list[list[tuple[int, int]]]:
    """Drafted and accepted tokens of the rounds of each answer, with drafts of four tokens."""
    assistant, found = Assistant(pair, FixedLength(4), None), []
    for prompt in PROMPTS:
        said(assistant, [prompt], most=40)
        assert assistant.last is not None
        found.append([(one.drafted, one.accepted) for one in assistant.last.rounds])
    return found


def among(head: Path, tokens: torch.Tensor) -> None:
    """Let a head draft among these tokens."""
    save_file(load_file(head / WEIGHTS) | {VOCABULARY: tokens}, head / WEIGHTS)
    config = json.loads((head / "config.json").read_text())
    config["head"]["vocabulary"] = len(tokens)
    (head / "config.json").write_text(json.dumps(config))


@pytest.mark.thorough(but="untied")
@pytest.mark.parametrize("target", LITTLE, indirect=True)
def test_it_drafts_what_it_drafts_for_the_target_in_memory(target: Path, tmp_path: Path) -> None:
    memory = LITTLE["tied" if target == BUNDLED / "target" else "untied"]
    head, other = save_head(target, tmp_path / "head"), save_head(target, tmp_path / "other", 0.3)
    among(other, torch.arange(0, 4000, 2))
    resident, streamed = load_pair(settings_of(target, head)), load_pair(settings_of(target, head, memory=memory))
    assert forward_of(streamed.target) is Forward.STREAMED
    assert streamed.target.cpu_forward.plan.stream is not None  # type: ignore[attr-defined]
    right = alone(resident, PROMPTS, 40)
    seen = []
    for folder in (None, other, None):
        for pair in (resident, streamed):
            engine_of(pair).apply_adapter(folder)
            assert said(Assistant(pair, FixedLength(4), None), PROMPTS, most=40) == right
        assert rounds(streamed) == rounds(resident)
        seen.append(rounds(streamed))
        drafting, whole = engine_of(streamed).cpu_forward, streamed.target.cpu_forward  # type: ignore[attr-defined]
        assert drafting is not None
        # It has no projection of its own, unless it drafts among few tokens.
        assert (drafting.plan.lm_head.kernel is whole.plan.lm_head.kernel) is (folder is None)
    assert seen[0] == seen[2] != seen[1]
    assert any(accepted for answer in seen[0] for _, accepted in answer)


@pytest.mark.skipif(not fast_int8(), reason="int8 is not faster on this processor")
def test_its_layer_is_int8_and_its_projection_the_targets(tmp_path: Path) -> None:
    head, few = save_head(BUNDLED / "target", tmp_path / "head"), save_head(BUNDLED / "target", tmp_path / "few", 0.3)
    among(few, torch.arange(0, 4000, 2))
    given = {"target": str(BUNDLED / "target"), "draft": str(head), "memory": "22MB", "history": "off"}
    pair = load_pair(load_settings(given))
    assert pair.target.weights == "bfloat16"
    assert pair.target.cpu_forward.plan.stream is not None  # type: ignore[attr-defined]
    right = alone(pair, PROMPTS, 40)
    for folder in (None, few, None):
        engine_of(pair).apply_adapter(folder)
        drafting, whole = engine_of(pair).cpu_forward, pair.target.cpu_forward  # type: ignore[attr-defined]
        assert drafting is not None
        projection = drafting.plan.lm_head
        assert all(linear.int8 for linear in drafting.plan.linears if linear is not projection)
        assert (projection.kernel is whole.plan.lm_head.kernel) is (folder is None)
        assert projection.int8 is (folder is not None)
        for policy in (FixedLength(4), FixedLength(12, tree=True)):
            assert said(Assistant(pair, policy, None), PROMPTS, most=40) == right
        if folder is None:
            assert any(accepted for answer in rounds(pair) for _, accepted in answer)


@pytest.mark.thorough
@pytest.mark.parametrize("target", LITTLE, indirect=True)
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_answers_are_the_targets_own(target: Path, quantize: str, tmp_path: Path) -> None:
    memory = {"tied": "8MB", "untied": "1.5MB"} if quantize == "int8" else LITTLE
    most = memory["tied" if target == BUNDLED / "target" else "untied"]
    head = save_head(target, tmp_path / "head", 0.1)
    pair = load_pair(settings_of(target, head, memory=most, quantize=quantize))
    assert forward_of(pair.target) is Forward.STREAMED
    right = alone(pair, PROMPTS)
    for policy in (FixedLength(1), FixedLength(9), FixedLength(12, tree=True), NodesByCost(), LengthByCost()):
        assert said(Assistant(pair, policy, None), PROMPTS) == right


@pytest.mark.parametrize("form", ["speculators", pytest.param("specforge", marks=pytest.mark.thorough)])
def test_an_eagle_head_reads_states_between_layers_on_disk(form: str, tmp_path: Path) -> None:
    target = save_eagle_target(tmp_path / "target")
    head = save_eagle(target, tmp_path / "head", form)
    resident, streamed = (load_pair(settings_of(target, head, memory=memory)) for memory in (None, "2.6MB"))
    assert forward_of(streamed.target) is Forward.STREAMED
    assert streamed.target.cpu_forward.plan.stream is not None  # type: ignore[attr-defined]
    assert said(Assistant(streamed, FixedLength(4), None), PROMPTS, most=40) == alone(resident, PROMPTS, 40)
    seen = rounds(streamed)
    assert seen == rounds(resident)
    assert any(accepted for answer in seen for _, accepted in answer)
    tokens = torch.randint(3, 4096, (700,), generator=torch.Generator().manual_seed(2))  # more than one native call
    held = [pair.target.sequence(features=True) for pair in (resident, streamed)]
    for sequence in held:
        sequence.extend(tokens, 1)
    assert torch.equal(*(sequence.features(0, len(tokens)) for sequence in held))
    policy = length_policy(load_settings({}), disk=drafts_for_disk(streamed), trees=makes_trees(streamed))
    assert isinstance(policy, LengthByCost)


def test_answers_at_once_with_chains_that_end_by_confidence_are_those_of_one_after_the_other(tmp_path: Path) -> None:
    """Of a head that makes no trees."""
    target = save_eagle_target(tmp_path / "target")
    pair = load_pair(settings_of(target, save_eagle(target, tmp_path / "head", "speculators"), memory="2.6MB"))
    sampling = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=5)]
    asked = [
        Question(
            encode_chat(pair, [Message("user", PROMPTS[number % 2])]), (), f"{number}", sampling[number // 2], STOP
        )
        for number in range(4)
    ]
    right = one_by_one(Assistant(pair, FixedLength(0), None), asked)
    policy = LengthByCost()
    assistant = Assistant(pair, policy, None)
    assert one_by_one(assistant, asked) == right
    assert policy.chosen.weight > 0  # drafts asked about their tokens
    before = policy.rounds
    for late in ((), (1, 3)):
        assert together(assistant, asked, late) == right
    assert policy.rounds > before


@pytest.mark.thorough
def test_the_head_in_the_checkpoint_drafts(tmp_path: Path) -> None:
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention", "full_attention"]
    folder = save_with_mtp("qwen3_5_text", tmp_path / "target", num_hidden_layers=len(layers), layer_types=layers)
    settings = {"target": str(folder), "dtype": "float32"}
    resident, streamed = (load_pair(load_settings(settings | {"memory": memory})) for memory in (None, "2.6MB"))
    assert forward_of(streamed.target) is Forward.STREAMED
    assert said(Assistant(streamed, FixedLength(4), None), PROMPTS, most=40) == alone(resident, PROMPTS, 40)
    assert rounds(streamed) == rounds(resident)


def test_the_length_is_learned_from_rounds_and_nothing_is_measured_before() -> None:
    """A measurement of a target that takes seconds a pass would take minutes."""
    settings = load_settings({"target": str(BUNDLED / "target"), "memory": "20MB", "dtype": "float32"})
    assert grows_on(settings) is not None
    pair = load_pair(settings)
    assert not pair.warnings
    assert (engine_of(pair).grown, engine_of(pair).ready) == (True, False)
    assert isinstance(length_policy(settings, disk=drafts_for_disk(pair), trees=makes_trees(pair)), NodesByCost)
    policy = length_policy(settings, disk=True)  # of a head that makes no trees
    assert isinstance(policy, LengthByCost)
    for _ in range(50):  # as long as the head is not trained
        assert policy.next_length(0) == 0
        policy.observe(Round("none", 0, 0, 0.0, 1.0))
    policy.swapped()
    chance = random.Random(0)
    for accepted in (0.9, 0.5, 0.75):  # one draft after the other
        chosen = []
        for _ in range(150):
            length = policy.next_length(1000)
            kept = next((n for n in range(length) if chance.random() > accepted), length)
            policy.observe(Round("head", length, kept, 0.005 * length, 1.0 + 0.02 * length))
            chosen.append(length)
        assert set(chosen[:3]) <= set(LENGTHS) - {0}
        rates = {n: sum(accepted**k for k in range(n + 1)) / (1.0 + 0.025 * n) for n in LENGTHS}
        late = chosen[-100:]
        assert sum(rates[length] for length in late) / len(late) > 0.9 * max(rates.values())


@pytest.mark.thorough
def test_one_is_grown_from_what_the_target_says(tmp_path: Path, adaptive: Command) -> None:
    asked = tmp_path / "prompts.jsonl"
    lines = (BUNDLED / "prompts" / "math.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    asked.write_text("\n".join(lines), encoding="utf-8")
    alone = ("--target", str(BUNDLED / "target"), "--memory", "40MB", "--dtype", "float32")
    status, _, errors = adaptive(
        "distill", "--prompts", str(asked), "--max-new-tokens", "40", "--max-seconds", "20", *alone
    )
    assert status == 0, errors
    status, out, errors = adaptive("adapters", "list", "--json", *alone[:2])
    assert status == 0, errors
    assert json.loads(out)
    given = ("--temperature", "0", "--max-new-tokens", "60", "--json", "--history", "off", "--draft-length", "4")
    _, plain, _ = adaptive("generate", PROMPTS[1], *given, *alone, "--draft-length", "0")
    status, out, errors = adaptive("generate", PROMPTS[1], *given, *alone)
    assert status == 0, errors
    assert json.loads(out)["tokens"] == json.loads(plain)["tokens"]
    assert json.loads(out)["timings"]["draft_n"] > 0
