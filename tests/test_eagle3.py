"""EAGLE-3 heads of both formats compute the formulas of their training code, and drafting with them is exact."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BUNDLED, Command
from foreign_heads import TAPS, save_eagle, save_eagle_target
from safetensors.torch import load_file, save_file
from test_head_engine import bound
from test_head_lossless import TOKENS, alone, as_if_new, said
from test_lossless_sampled import IDS, PARAMS, RUNS, VOCAB, exact_distribution, p_value, run_loop
from tiny_models import save, tiny_model
from transformers import AutoModelForCausalLM

from adaptive.assistant import Assistant, length_policy
from adaptive.control.policy import FixedLength
from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.forward import FEW
from adaptive.engines.head.eagle import Eagle3Head, EagleConfig, read_eagle
from adaptive.engines.head.engine import HeadEngine
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.load import forward_of
from adaptive.engines.protocol import ExtendCall
from adaptive.errors import AdaptiveError
from adaptive.pair import Pair, load_pair, pair_identity
from adaptive.settings import Settings, load_settings
from adaptive.types import Message, SamplingParams, StopParams

GREEDY = SamplingParams(temperature=0.0)
FORMATS = ("specforge", "speculators")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eagle_target(tmp_path_factory.mktemp("targets") / "target")


def settings_of(target: Path, draft: Path) -> Settings:
    return load_settings({"target": str(target), "draft": str(draft), "dtype": "float32", "device": "cpu"})


def loaded(target: Path, head: Path, ours: bool = True) -> tuple[Pair, TransformersEngine, HeadEngine]:
    """A pair and the engines of its target and its head; with ``ours`` our forward runs (layer by layer)."""
    pair = load_pair(settings_of(target, head))
    assert isinstance(pair.target, TransformersEngine)
    assert isinstance(pair.draft, HeadEngine)
    if not ours:
        pair.target.cpu_forward = None
    return pair, pair.target, pair.draft


def states_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The target's hidden states (n, taps * width) before the layers in ``TAPS``, by transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = model(tokens[None], output_hidden_states=True).hidden_states
    return torch.cat([found[number][0] for number in TAPS], dim=-1)


@torch.inference_mode()
def by_formula(folder: Path, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (n - 1, vocab) of a head for a text (n,), given the target's states for its beginning. Follows the
    formulas in docs/notes/2026-11-foreign-heads.md, a row at a time."""
    w = {name.replace("midlayer", "layers.0"): t.float() for name, t in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    layer = config.get("transformer_layer_config", config)
    heads, size, eps = layer["num_attention_heads"], layer["head_dim"], layer["rms_norm_eps"]
    width, vocab = layer["hidden_size"], layer["vocab_size"]
    embedding = w.get("embed_tokens.weight")
    if embedding is None:
        embedding = load_file(folder.parent / "target" / "model.safetensors")["model.embed_tokens.weight"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    def turned(x: torch.Tensor, place: int) -> torch.Tensor:
        angle = place * layer["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        one, other = x.chunk(2, dim=-1)
        return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], dim=-1)

    def projected(x: torch.Tensor, part: str) -> torch.Tensor:
        found = (w[f"layers.0.self_attn.{part}_proj.weight"] @ x).view(heads, size)
        normed = f"layers.0.self_attn.{part}_norm"
        return norm(found, normed) if f"{normed}.weight" in w else found

    def read(state: torch.Tensor) -> torch.Tensor:
        if config.get("norm_before_fc"):
            return norm(state, "input_norm")
        if config.get("fc_norm"):
            return torch.cat([norm(part, f"fc_norm.{place}") for place, part in enumerate(state.chunk(len(TAPS)))])
        return state

    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    rows, made = [], torch.zeros(width)
    for place in range(1, len(tokens)):
        feature = w["fc.weight"] @ read(states[place - 1]) if place <= len(states) else made
        normed = norm(feature, "layers.0.hidden_norm")
        both = torch.cat([norm(embedding[tokens[place]], "layers.0.input_layernorm"), normed])
        keys.append(turned(projected(both, "k"), place))
        values.append(projected(both, "v"))
        scores = torch.stack([(turned(projected(both, "q"), place) * key).sum(-1) for key in keys], dim=-1) / size**0.5
        attended = torch.einsum("hn,nhs->hs", scores.softmax(-1), torch.stack(values)).flatten()
        x = (normed if config.get("norm_before_residual") else feature) + w[
            "layers.0.self_attn.o_proj.weight"
        ] @ attended
        y = norm(x, "layers.0.post_attention_layernorm")
        gate = torch.nn.functional.silu(w["layers.0.mlp.gate_proj.weight"] @ y)
        made = x + w["layers.0.mlp.down_proj.weight"] @ (gate * (w["layers.0.mlp.up_proj.weight"] @ y))
        normed = norm(made, "norm")
        few = w["lm_head.weight"] @ normed
        made = normed if config.get("norm_output") else made
        row = torch.full((vocab,), -torch.inf)
        row[torch.arange(len(few)) + w["d2t"].long()] = few
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("ours", [True, False], ids=["kernels", "transformers"])
@pytest.mark.parametrize(
    ("written_by", "kind", "said"),
    [
        ("specforge", "llama", {}),
        ("specforge", "llama", {"norm_before_fc": True}),
        ("speculators", "llama", {}),
        ("speculators", "qwen3", {"norm_output": True, "fc_norm": True}),
    ],
    ids=["specforge", "specforge, normed", "speculators", "speculators, qwen3, normed"],
)
def test_logits_are_those_of_the_formulas(
    target: Path, tmp_path: Path, written_by: str, kind: str, said: dict[str, bool], ours: bool
) -> None:
    (tmp_path / "target").symlink_to(target)
    folder = save_eagle(target, tmp_path / "head", written_by, few=500, alike=False, kind=kind, **said)
    _, engine, head = loaded(target, folder, ours)
    held, draft = bound(engine, head)
    tokens = torch.randint(3, 4096, (30,), generator=torch.Generator().manual_seed(2))
    known = 24
    held.extend(tokens[:known], 1)
    right = by_formula(folder, states_of(target, tokens[:known]), tokens)
    found, done = [], 0
    for count in (1, 5, 1, 16, 1, 3, 1, 1, 1):  # the last passes read the head's own states
        found.append(draft.extend(tokens[done : done + count], count).clone())
        done += count
    assert done == draft.length == len(tokens)
    got = torch.cat(found)
    assert torch.equal(got[0], torch.zeros(4096))  # the first token has no preceding state
    assert torch.equal(got[1:].isinf(), right.isinf())
    assert int((~right[0].isinf()).sum()) == 500
    some = ~right[0].isinf()
    scale = right[:, some].abs().max()
    torch.testing.assert_close(got[1:, some] / scale, right[:, some] / scale, rtol=0, atol=1e-4)
    # The comparison above can fail: with the other input of the residual connection the logits differ.
    assert isinstance(head.head, Eagle3Head)
    head.head._added = not head.head._added
    other = head.sequence_of(held).extend(tokens[: known + 1], known)
    assert not torch.allclose(other[:, some] / scale, right[:known][:, some] / scale, atol=0.01)


@pytest.mark.parametrize("forward", ["one call", "layers", "torch", "transformers"])
def test_a_target_keeps_the_states_before_several_layers(
    target: Path, forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forward == "torch":
        monkeypatch.setattr(kernels, "library", lambda: None)
    engine = TransformersEngine(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32))
    if forward == "transformers":
        engine.cpu_forward = None
    if engine.cpu_forward is not None:
        assert engine.cpu_forward.fused == (kernels.library() is not None)
        engine.cpu_forward.fused &= forward == "one call"
    engine.give_features_before((*TAPS, 5))
    assert engine.feature_width == 4 * 64
    tokens = torch.randint(3, 4096, (FEW + 9,), generator=torch.Generator().manual_seed(2))
    held = engine.sequence(features=True)
    done = 0
    for count in (1, 3, FEW + 2, 3):
        held.extend(tokens[done : done + count], 1)
        done += count
    right = states_of(target, tokens)
    found = held.features(0, len(tokens))
    torch.testing.assert_close(found[:, : 3 * 64], right, rtol=1e-3, atol=1e-3)
    last = engine._features.norm(found[:, 3 * 64 :])  # type: ignore[misc]
    torch.testing.assert_close(engine.model.lm_head(last[-1:]), held_logits(engine, tokens), rtol=1e-3, atol=1e-3)
    if engine.trees:
        held.extend([5, 6, 7], 1, [-1, -1, 1])
        held.keep([1, 2])
        other = engine.sequence(features=True)
        other.extend(torch.cat([tokens, torch.tensor([6, 7])]), 1)
        torch.testing.assert_close(held.features(done, done + 2), other.features(done, done + 2), rtol=1e-3, atol=1e-3)
        after = [ExtendCall(held, tokens[:3], 1), ExtendCall(other, tokens[3:7], 2)]
        engine.together.extend(after)
        for call, sequence in zip(after, (held, other), strict=True):
            alone = engine.sequence(features=True)
            alone.extend(torch.cat([tokens, torch.tensor([6, 7]), call.tokens]), 1)
            ends = done + 2, done + 2 + len(call.tokens)
            torch.testing.assert_close(sequence.features(*ends), alone.features(*ends), rtol=1e-3, atol=1e-3)
    with pytest.raises(AdaptiveError, match="before layers"):
        engine.give_features_before((1, 6))


def held_logits(engine: TransformersEngine, tokens: torch.Tensor) -> torch.Tensor:
    return engine.sequence().extend(tokens, 1)


@pytest.fixture(scope="module", params=[pytest.param("specforge", marks=pytest.mark.thorough), "speculators"])
def pair(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = save_eagle(target, tmp_path_factory.mktemp(request.param) / "head", request.param)
    found = load_pair(settings_of(target, folder))
    assert found.draft is not None
    assert found.draft.name == "eagle3"
    assert found.identity.id.startswith("target--head-")
    return found


@pytest.mark.parametrize(
    "ours", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["kernels", "transformers"]
)
@pytest.mark.parametrize("some", [pytest.param(1, marks=pytest.mark.long, id="twenty-prompts"), 10])
def test_greedy_output_equals_the_target_alone(
    pair: Pair, some: int, ours: bool, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ours:
        monkeypatch.setattr(pair.target, "cpu_forward", None)
    most = TOKENS if some == 1 else 40
    wanted = alone(pair, prompts[::some], most)
    accepted = drafted = 0
    for length in ("1", "4", "9", "auto"):
        assistant = Assistant(pair, length_policy(load_settings({"draft_length": length})), None)
        for prompt, right in zip(prompts[::some], wanted, strict=True):
            assert said(assistant, [prompt], most=most) == [right]
            assert assistant.last is not None
            assert {outcome.drafter for outcome in assistant.last.rounds} <= {"eagle3", "none"}
            accepted, drafted = accepted + assistant.last.accepted, drafted + assistant.last.drafted
    assert 0 < accepted < drafted, "nothing was accepted, or nothing taken back: this would test neither"


def test_a_conversation_goes_on_from_what_both_hold(pair: Pair, prompts: list[str]) -> None:
    plain = Assistant(Pair(pair.identity, pair.target, None, pair.tokenizer, ()), FixedLength(0), None)
    drafted = Assistant(pair, FixedLength(4), None, cache_bytes=2**28)
    stop = StopParams(max_new_tokens=20, ignore_eos=True)
    for prompt in prompts[:2]:
        messages = [Message("system", "You answer in short sentences. " * 4), Message("user", prompt)]
        for more in ("Go on.", "Say it again."):
            texts = [[step.token for step in one.chat(messages, GREEDY, stop)] for one in (plain, drafted)]
            assert texts[0] == texts[1]
            assert drafted.last is not None
            as_if_new(pair, drafted.conversations.take(drafted.last.committed))
            messages += [Message("assistant", drafted.last.text), Message("user", more)]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> tuple[TransformersEngine, HeadEngine]:
    """A tiny target over eight tokens, and a head whose vocabulary holds five of them."""
    from adaptive.engines.head.kinds import HeadKind
    from adaptive.engines.load import Source
    from adaptive.engines.load_head import load_head

    folder = tmp_path_factory.mktemp("few")
    model = tiny_model("llama", num_hidden_layers=4, vocab_size=VOCAB, max_position_embeddings=64, pad_token_id=None)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.15)
    save(model, folder / "target")
    save_eagle(folder / "target", folder / "head", "speculators", few=5)
    engine = TransformersEngine(model)
    source = Source("head", folder / "head", "none", head=HeadKind.EAGLE3)
    return engine, load_head(source, load_settings({"device": "cpu", "dtype": "float32"}), engine)


@pytest.mark.thorough
@pytest.mark.parametrize("params", [PARAMS[1], PARAMS[4]], ids=[IDS[1], IDS[4]])
def test_over_a_reduced_vocabulary_the_whole_loop_samples_from_the_target(
    few: tuple[TransformersEngine, HeadEngine], params: SamplingParams
) -> None:
    exact = exact_distribution(few[0], params)
    outside = set(range(VOCAB)) - set(few[1].head.ids.tolist())  # type: ignore[attr-defined]
    assert len(outside) == 3
    assert sum(p for outcome, p in exact.items() if outside & set(outcome[1:])) > 0.05, "nothing outside would be said"
    assert p_value(run_loop(few, params, length=2, runs=RUNS // 2), exact) > 0.001


def test_layers_are_named_by_what_goes_in_or_by_what_comes_out(target: Path, tmp_path: Path) -> None:
    one, other = (read_eagle(save_eagle(target, tmp_path / name, name)) for name in FORMATS)
    assert one.taps == other.taps == TAPS
    assert (one.norm_before_residual, other.norm_before_residual) == (False, True)
    usual = EagleConfig(one.layer, 1, 1, 1, None, False, False)
    assert usual.taps_of(32) == (2, 16, 29)


@pytest.mark.parametrize("written_by", FORMATS)
def test_what_does_not_fit_is_refused_in_one_line(target: Path, tmp_path: Path, written_by: str) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(AdaptiveError) as error:
            load_pair(settings_of(target, folder))
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400
        return str(error.value)

    whole = save_eagle(target, tmp_path / "whole", written_by, few=50)
    file, tensors = whole / "model.safetensors", load_file(whole / "model.safetensors")

    def with_tensors(changed: dict[str, torch.Tensor]) -> Path:
        save_file(changed, file, metadata={"format": "pt"})
        return whole

    without = {name: t for name, t in tensors.items() if not name.endswith("hidden_norm.weight")}
    assert "lacks layers.0.hidden_norm.weight" in refused(with_tensors(without))
    assert "lacks d2t" in refused(with_tensors({name: t for name, t in tensors.items() if name != "d2t"}))
    assert "names tokens (d2t) that" in refused(with_tensors({**tensors, "d2t": tensors["d2t"] + 4096}))
    assert "has a tensor other.weight, which is not known" in refused(
        with_tensors({**tensors, "other.weight": tensors["norm.weight"] + 0})
    )
    wrong = {**tensors, "fc.weight": tensors["fc.weight"][:, :64].contiguous()}
    assert "fc.weight is (64, 64), and its config asks for (64, 192)" in refused(with_tensors(wrong))
    with_tensors(tensors)
    file.write_bytes(file.read_bytes()[:-40])
    assert "cannot be read" in refused(whole)
    file.unlink()
    assert "holds no weights" in refused(whole)
    size = save_eagle(target, tmp_path / "size", written_by, few=50, target_hidden_size=96)
    assert "for a target with hidden size 96, and this one has 64" in refused(size)
    kind = save_eagle(target, tmp_path / "kind", written_by, few=50, kind="gpt_neox")
    assert "its layers are of type gpt_neox, and llama and qwen3 are known" in refused(kind)
    words = save_eagle(target, tmp_path / "words", written_by, few=50)
    config = json.loads((words / "config.json").read_text())
    config.get("transformer_layer_config", config)["vocab_size"] = 999
    (words / "config.json").write_text(json.dumps(config))
    assert "for a target with a vocabulary of 999, and this one has 4096" in refused(words)
    layers = save_eagle(target, tmp_path / "layers", written_by, few=50, eagle_aux_hidden_state_layer_ids=[1, 3, 60])
    assert "for a target with layers (1, 3, 60), and this one has 5" in refused(layers)


def test_it_is_no_target(target: Path, tmp_path: Path) -> None:
    folder = save_eagle(target, tmp_path / "head", "specforge", few=50)
    with pytest.raises(AdaptiveError, match="is a head, which only drafts"):
        load_pair(load_settings({"target": str(folder), "draft": "none"}))
    assert pair_identity(settings_of(target, folder)).base.id == str(folder)


def test_doctor_names_it_and_the_forwards(target: Path, tmp_path: Path, adaptive: Command) -> None:
    folder = save_eagle(target, tmp_path / "head", "speculators", few=50)
    models = ("--target", str(target), "--draft", str(folder), "--dtype", "float32", "--device", "cpu")
    status, out, _ = adaptive("doctor", *models, "--json")
    rows = {row["name"]: row["value"] for row in json.loads(out)["findings"]}
    assert status == 0
    assert rows["draft"] == f"{folder} (an EAGLE-3 head)"
    pair, _, head = loaded(target, folder)
    assert rows["target forward"] == f"{forward_of(pair.target).value} (float32)"
    assert rows["draft forward"] == f"{forward_of(head).value} (float32)"


@pytest.mark.parametrize("written_by", FORMATS)
def test_it_is_exported_as_speculators_writes_them(
    target: Path, tmp_path: Path, written_by: str, adaptive: Command
) -> None:
    folder = save_eagle(target, tmp_path / "head", written_by, few=500, alike=False)
    models = ("--target", str(target), "--draft", str(folder))
    made = tmp_path / "made here"
    asked = ("adapters", "export", "draft", str(made), "--format", "speculators", *models)
    status, out, errors = adaptive(*asked)
    assert status == 0, errors
    *command, said = shlex.split(out.splitlines()[-1])
    assert command == ["vllm", "serve", str(target), "--speculative-config"]
    assert json.loads(said)["model"] == str(made)
    config = json.loads((made / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == list(TAPS)
    tensors, before = load_file(made / "model.safetensors"), load_file(folder / "model.safetensors")
    assert torch.equal(tensors["t2d"], before["t2d"])
    assert "layers.0.self_attn.q_proj.weight" in tensors
    tokens = torch.randint(3, 4096, (20,), generator=torch.Generator().manual_seed(2))
    logits = []
    for one in (folder, made):
        _, engine, head = loaded(target, one)
        held, draft = bound(engine, head)
        held.extend(tokens[:-1], 1)
        logits.append(draft.extend(tokens, 19).clone())
    assert torch.equal(logits[0], logits[1])
    status, _, errors = adaptive(*asked)
    assert status == 2
    assert "is not empty" in errors
    for draft, what in (("none", "none"), (str(BUNDLED / "draft"), str(BUNDLED / "draft"))):
        status, _, errors = adaptive(
            *asked[:3], str(tmp_path / "x"), *asked[4:6], "--target", str(target), "--draft", draft
        )
        assert status == 2
        assert f"writes an EAGLE-3 head, and the draft is {what}" in errors.replace("\n", " ")
