"""An EAGLE-3 head that is grown on a log: where it starts, what it learns, its files for other servers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUNDLED, Command
from foreign_heads import save_eagle, save_eagle_target
from safetensors.torch import load_file
from test_trainer import VOCAB, config, speak
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
)

from adaptive.engines.head.eagle import Eagle3Head, EagleConfig
from adaptive.engines.head.parts import shared_of_model
from adaptive.engines.head.speculators import check_other_weights, save
from adaptive.errors import AdaptiveError
from adaptive.records.writer import LogWriter
from adaptive.types import SamplingParams
from checkpoints.manifest import BaseDraft
from trainers.dataset import Example, Stopped, examples, read_log
from trainers.eagle import EagleStart, EagleStudent, grow, start_of, taps_of
from trainers.fit import Progress
from trainers.recipe import Recipe
from trainers.replay import acceptance_rate
from trainers.sets import Sets, gather
from trainers.states import States, narrowed, with_states

SHORT = Recipe(epochs=5, evaluations=4, batch=16)
ENOUGH = 1 << 30
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "intermediate_size": 48, "max_position_embeddings": 128,
}  # fmt: skip


def enough() -> int:
    return ENOUGH


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    """Four layers, each of which adds little, so that the next token depends mainly on the last one."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(config(layers=4)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.3)
    return model


@pytest.fixture(scope="module")
def log(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("log") / "records.db"
    with LogWriter(file) as writer:
        for one in speak(target, 100, SamplingParams(temperature=0.7)):
            writer.write(one)
        assert writer.flush()
    return file


def with_uneven_norms(kind: str, seed: int) -> Any:
    """A random model of this type whose norms have factors of their own."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.linspace(-0.2, 0.4, len(parameter)))
    return model


def sets_of(log: Path, recipe: Recipe = SHORT) -> Sets:
    return gather(log, None, None, recipe, BaseDraft("none", "none"), 64, None)[0]


def head_of(target: LlamaForCausalLM, start: EagleStart, folder: Path) -> Eagle3Head:
    said = EagleConfig(None, VOCAB, VOCAB, target.config.hidden_size, start.taps, True, False)
    save(folder, start.tensors, said, start.layer, "target", target.config.architectures)
    return Eagle3Head(shared_of_model(target), folder, torch.float32)


def test_states_are_those_that_transformers_returns(target: LlamaForCausalLM, log: Path) -> None:
    said = examples(read_log(log, 3), 64)
    states = States(target, (1, 2, 4))
    found = with_states(said, states, 64, ENOUGH)
    states_of_first = states.of(torch.from_numpy(np.concatenate([said[0].prompt, said[0].output[:-1]])).long()).numpy()
    for example in found:
        text = torch.from_numpy(np.concatenate([example.prompt, example.output[:-1]])).long()
        seen: list[torch.Tensor] = []
        hook = target.model.norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))  # type: ignore[misc]
        with torch.inference_mode():
            hidden = target(text[None], output_hidden_states=True).hidden_states
        hook.remove()
        wanted = torch.cat([hidden[1], hidden[2], seen[0]], dim=-1)[0]
        torch.testing.assert_close(states.of(text), wanted, rtol=0, atol=1e-5)
        kept = example.states()
        assert kept is not None
        assert example.covered(kept)
        np.testing.assert_allclose(kept.states(), wanted.numpy(), atol=float(wanted.abs().max()) / 100)
    for width in (32, 64):  # half a block of numbers, and a whole one
        part = narrowed(found[0], width).states()
        assert part is not None
        np.testing.assert_allclose(
            part.states(), states_of_first[:, :width], atol=float(np.abs(states_of_first).max()) / 50
        )
    each = found[0].features.nbytes  # type: ignore[union-attr]
    assert [e.id for e in with_states(said, states, 64, 2 * each)] == [e.id for e in said[-2:]]
    with pytest.raises(Stopped):
        with_states(said, states, 64, ENOUGH, should_stop=lambda: True)


@pytest.mark.thorough
def test_a_head_starts_as_the_fitted_map_and_learns(target: LlamaForCausalLM, log: Path, tmp_path: Path) -> None:
    """At the start it accepts what a linear map can know; with its value projection shuffled it accepts little."""
    sets, taps = sets_of(log), taps_of(4)
    start = start_of(target, with_states(sets.train, States(target, (*taps, 4)), 64, ENOUGH), taps)
    held = with_states(sets.gate, States(target, taps), 64, ENOUGH)

    def accepted(head: Eagle3Head) -> float:
        return acceptance_rate(EagleStudent(head, SHORT, tmp_path).replay(held))

    first = accepted(head_of(target, start, tmp_path / "start"))
    value = start.tensors["layers.0.self_attn.v_proj.weight"]
    mixed = {**start.tensors, "layers.0.self_attn.v_proj.weight": value.roll(1, dims=0)}
    assert first > accepted(head_of(target, EagleStart(mixed, start.layer, start.taps), tmp_path / "mixed")) + 0.05
    told: list[Progress] = []
    grown = grow(lambda: target, "target", sets, SHORT, tmp_path / "head", enough, tmp_path, told.append)
    assert grown.figures is not None
    assert grown.figures.acceptance_after.mean > first
    assert grown.figures.gain.low > 0
    assert len(grown.by_step) == SHORT.draft_length
    assert {one.counted for one in told} == {"texts read", "steps"}
    assert max(one.step for one in told if one.counted == "texts read") == len(sets.train + sets.validation + sets.gate)
    again = EagleStudent(Eagle3Head(shared_of_model(target), tmp_path / "head", torch.float32), SHORT, tmp_path)
    assert acceptance_rate(again.replay(held)) == pytest.approx(grown.figures.acceptance_after.mean, abs=1e-3)
    own = load_file(tmp_path / "head" / "model.safetensors")
    torch.testing.assert_close(own["lm_head.weight"], target.lm_head.weight, rtol=0, atol=0)  # never trained


@pytest.mark.thorough
def test_a_head_that_is_stopped_before_it_was_judged_is_nothing(
    target: LlamaForCausalLM, log: Path, tmp_path: Path
) -> None:
    told: list[Progress] = []
    for begun in (lambda: True, lambda: any(one.counted == "steps" for one in told)):
        with pytest.raises(Stopped):
            grow(lambda: target, "target", sets_of(log), SHORT, tmp_path / "head", enough, tmp_path, told.append, begun)
        assert not (tmp_path / "head").exists()


@pytest.mark.thorough
def test_a_head_that_is_stopped_later_is_kept_as_it_was_best(
    target: LlamaForCausalLM, log: Path, tmp_path: Path
) -> None:
    told: list[Progress] = []

    def judged() -> bool:
        return any(one.held_out_acceptance > 0 for one in told)

    grown = grow(
        lambda: target, "target", sets_of(log), SHORT, tmp_path / "head", enough, tmp_path, told.append, judged
    )
    assert grown.fit.stopped
    assert grown.figures is None
    assert Eagle3Head(shared_of_model(target), tmp_path / "head", torch.float32).taps == taps_of(4)


def test_layers_that_are_read() -> None:
    assert taps_of(32) == (16, 30, 31)
    assert taps_of(5) == (2, 3, 4)
    assert taps_of(4) == (1, 2, 3)
    assert taps_of(3) == (0, 1, 2)


def test_a_target_without_its_kind_of_norm_or_layers_is_refused(log: Path) -> None:
    said: list[Example] = examples(read_log(log, 4), 64)
    with pytest.raises(AdaptiveError, match="before three layers, and the target has 2"):
        taps_of(2)
    other = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64
        )
    )
    with pytest.raises(AdaptiveError, match="no head can be grown"):
        start_of(other, said, taps_of(4))


@pytest.mark.thorough
def test_a_head_that_cannot_be_written_in_the_end_is_kept(target: LlamaForCausalLM, log: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder, scratch = tmp_path / "file" / "head", tmp_path / "scratch"
    scratch.mkdir()
    quick = replace(SHORT, epochs=1, evaluations=1)
    with pytest.raises(AdaptiveError, match=r"cannot be written .*; the head is in ") as caught:
        grow(lambda: target, "target", sets_of(log), quick, folder, enough, scratch)
    (kept,) = scratch.iterdir()
    assert str(caught.value).endswith(str(kept))
    assert Eagle3Head(shared_of_model(target), kept, torch.float32).taps == taps_of(4)


def test_too_little_memory_for_states_is_said_when_the_target_is_loaded(
    target: LlamaForCausalLM, log: Path, tmp_path: Path
) -> None:
    loaded: list[LlamaForCausalLM] = []

    def little() -> int:
        assert loaded
        return 1000

    with pytest.raises(AdaptiveError, match=r"the hidden states of 0 texts to train on, 0 to choose .* too few"):
        grow(lambda: loaded.append(target) or target, "x", sets_of(log), SHORT, tmp_path / "h", little, tmp_path)
    assert not (tmp_path / "h").exists()


def test_a_target_on_which_none_can_grow_is_refused_before_its_states_are_computed(log: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("stablelm", **SIZES), dtype=torch.float32)
    told: list[Progress] = []
    with pytest.raises(AdaptiveError, match="it has a LayerNorm"):
        grow(lambda: model, "x", sets_of(log), SHORT, tmp_path / "h", enough, tmp_path, told.append)
    assert not told


@pytest.mark.thorough(but="olmo2")
@pytest.mark.parametrize("kind", ["qwen3_5_text", "olmo2"])
def test_it_begins_with_the_mlp_of_a_layer_only_behind_the_norm_that_is_there(kind: str, log: Path) -> None:
    """Qwen 3.5 stores a norm's factors less one; OLMo 2 gives the name of Llama's norm to one behind the attention."""
    model = with_uneven_norms(kind, seed=5)
    taps, last = taps_of(4), model.get_decoder().layers[-1]
    said = with_states(examples(read_log(log, 20), 64), States(model, (*taps, 4)), 64, ENOUGH)
    start = start_of(model, said, taps).tensors
    down, norm = start["layers.0.mlp.down_proj.weight"], start["layers.0.post_attention_layernorm.weight"]
    if kind == "olmo2":
        assert not down.any()
        return
    torch.testing.assert_close(norm, 1 + last.post_attention_layernorm.weight.detach(), rtol=0, atol=1e-3)
    scale = float(down.norm() / last.mlp.down_proj.weight.detach().norm())
    torch.testing.assert_close(down, scale * last.mlp.down_proj.weight.detach())


def test_other_weights_in_its_folder_are_not_taken_for_its_own(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(AdaptiveError, match=r"holds model-00001-of-00002\.safetensors, which would be read as a part"):
        check_other_weights(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3"])
def test_other_families_grow_one_too(kind: str, tmp_path: Path) -> None:
    """Gemma's norms store their factors less one and its MLP is another; Qwen 3's heads are wider than its model."""
    model = with_uneven_norms(kind, seed=4)
    with LogWriter(tmp_path / "records.db") as writer:
        for one in speak(model, 60, SamplingParams(temperature=0.7)):
            writer.write(one)
        assert writer.flush()
    grown = grow(lambda: model, "x", sets_of(tmp_path / "records.db"), SHORT, tmp_path / "head", enough, tmp_path)
    assert grown.figures is not None
    norm = model.get_decoder().norm
    effective = load_file(tmp_path / "head" / "model.safetensors")["norm.weight"]
    factors = norm.weight + (1.0 if kind.startswith("gemma") else 0.0)
    assert float((effective - factors).detach().abs().max()) < 0.5  # trained from there
    assert grown.figures.acceptance_after.mean > 0.1


def test_a_gguf_file_holds_the_head_in_llama_cpps_order(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from adaptive.engines.llamacpp.eagle import write_eagle

    target = save_eagle_target(tmp_path / "target")
    head = save_eagle(target, tmp_path / "head", "specforge")
    file = tmp_path / "head.gguf"
    text, tokenizer = AutoConfig.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    write_eagle(head, text, tokenizer, file, "f32", "head")
    read = gguf.GGUFReader(file)
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in read.tensors}
    own = load_file(head / "model.safetensors")
    few = len(own["d2t"])
    assert found["d2t"].tolist() == (torch.arange(few) + own["d2t"]).tolist()
    assert "token_embd.weight" not in found
    for name, key in (("fc", "fc"), ("output", "lm_head"), ("blk.0.attn_norm_2", "midlayer.hidden_norm")):
        assert torch.equal(found[f"{name}.weight"], own[f"{key}.weight"])
    size, rows = 16, own["midlayer.self_attn.k_proj.weight"]
    for place in (0, 1, 5):  # neighbours are rotated together, where a checkpoint rotates the two halves of a head
        assert torch.equal(found["blk.0.attn_k.weight"][2 * place], rows[place])
        assert torch.equal(found["blk.0.attn_k.weight"][2 * place + 1], rows[size // 2 + place])
    fields = {key: field.contents() for key, field in read.fields.items()}
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.target_layers"] == [1, 3, 4]
    assert fields["eagle3.attention.head_count"] == 4
    assert fields["eagle3.norm_before_residual"] is False


def test_the_frequencies_of_llama_3_have_the_name_that_llama_cpp_reads(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from adaptive.engines.llamacpp.eagle import write_eagle

    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    target = save_eagle_target(tmp_path / "target")
    rope = {**scaled, "original_max_position_embeddings": 64}
    head = save_eagle(target, tmp_path / "head", "specforge", rope_scaling=rope)
    text, tokenizer = AutoConfig.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    write_eagle(head, text, tokenizer, tmp_path / "head.gguf", "f32", "head")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "head.gguf").tensors}
    (name,) = (name for name in tensors if "rope" in name)
    assert name == "rope_freqs.weight"
    assert tensors[name][0] == 1
    assert tensors[name][-1] == 8


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"kind": "qwen3"}, "its layer is of type qwen3"),
        ({"fc_norm": True}, "it norms each state apart"),
        ({"norm_output": True}, "its next row reads what the final norm returns"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, "after its last layer"),
    ],
)
def test_a_head_that_llama_cpp_does_not_compute_is_refused(said: dict[str, Any], reason: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from adaptive.engines.llamacpp.eagle import write_eagle

    target = save_eagle_target(tmp_path / "target")
    head = save_eagle(target, tmp_path / "head", "speculators", **said)
    with pytest.raises(AdaptiveError, match=reason):
        write_eagle(
            head, AutoConfig.from_pretrained(target), AutoTokenizer.from_pretrained(target), tmp_path / "x", "f32", "x"
        )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gemma3_text", "smollm3", "phi3", "olmo2"])
def test_a_target_whose_states_llama_cpp_does_not_give_is_refused(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from adaptive.engines.llamacpp.eagle import write_eagle

    target = save_eagle_target(tmp_path / "target")
    head = save_eagle(target, tmp_path / "head", "speculators")
    config, tokenizer = AutoConfig.for_model(kind, **SIZES), AutoTokenizer.from_pretrained(target)
    with pytest.raises(AdaptiveError, match=f"of targets of the type {kind} it does not give the states"):
        write_eagle(head, config, tokenizer, tmp_path / "x", "f32", "x")


def test_what_cannot_end_well_is_refused_before_it_begins(tmp_path: Path, adaptive: Command) -> None:
    (tmp_path / "file").touch()
    alone = ("--target", str(BUNDLED / "target"), "--draft", "none", "--state-dir", str(tmp_path / "state"))
    for arguments, said in (
        ((str(tmp_path / "file" / "head"),), "cannot be written"),
        ((str(tmp_path / "head"), "--memory", "100MB"), "leave --memory out (`adaptive chat` and"),
    ):
        status, _, errors = adaptive("head", *arguments, *alone)
        assert status == 2
        assert said in errors.splitlines()[-1]
    assert not (tmp_path / "head").exists()


@pytest.mark.thorough
def test_the_command_grows_a_head_that_drafts_here_and_is_exported(tmp_path: Path, adaptive: Command) -> None:
    state, exact = ("--state-dir", str(tmp_path / "state")), ("--dtype", "float32", "--device", "cpu")
    alone = ("--target", str(BUNDLED / "target"), "--draft", "none", *state, *exact)
    head, file = tmp_path / "head", tmp_path / "head.gguf"
    status, _, errors = adaptive("head", str(head), *alone)
    assert status == 2
    assert "there is no log at" in errors
    lines = (BUNDLED / "prompts" / "tools.jsonl").read_text(encoding="utf-8").splitlines()
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("\n".join(lines[:60]), encoding="utf-8")
    short = ("--max-new-tokens", "40", "--history", "off", "--json")
    status, _, errors = adaptive("generate", "--prompts", str(asked), *alone, *short, "--temperature", "0.7")
    assert status == 0, errors
    status, out, errors = adaptive("head", str(head), *alone, "--epochs", "2", "--json")
    assert status == 0, errors
    outcome = json.loads(out)
    assert outcome["held_out"]["gain"]["low"] > 0.1
    status, _, errors = adaptive("head", str(head), *alone)
    assert status == 2
    assert "is not empty" in errors.replace("\n", " ")
    with_head = ("--target", str(BUNDLED / "target"), "--draft", str(head), *state)
    for line in lines[60:62]:
        prompt, greedy = str(json.loads(line)["prompt"]), ("--temperature", "0", "--draft-length", "4", *short)
        status, plain, errors = adaptive("generate", prompt, *alone, *greedy)
        assert status == 0, errors
        status, drafted, errors = adaptive("generate", prompt, *with_head, *exact, *greedy)
        assert status == 0, errors
        assert json.loads(drafted)["tokens"] == json.loads(plain)["tokens"]
    status, _, errors = adaptive("adapters", "export", "draft", str(tmp_path / "p"), *with_head)
    assert (status, "needs --format" in errors) == (2, True)
    status, out, errors = adaptive("adapters", "export", "draft", str(file), "--format", "gguf", *with_head)
    assert status == 0, errors
    assert "--spec-type draft-eagle3" in out
    status, out, errors = adaptive(
        "adapters", "export", "draft", str(tmp_path / "s"), "--format", "speculators", *with_head
    )
    assert status == 0, errors
    assert load_file(tmp_path / "s" / "model.safetensors").keys() >= {"fc.weight", "lm_head.weight"}
