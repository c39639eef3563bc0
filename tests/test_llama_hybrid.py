"""Models with recurrent layers on llama.cpp produce the text of llama.cpp alone, whatever is rolled back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUNDLED, save_random_adapter
from gguf_pair import decode_alone, engine, write
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models import VISION, several_kinds
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from typer.testing import CliRunner

from adaptive.assistant import Assistant, encode_chat
from adaptive.control.policy import FixedLength
from adaptive.engines.llamacpp.engine import LlamaCppEngine, LlamaCppSequence
from adaptive.engines.llamacpp.model import LlamaModel
from adaptive.engines.llamacpp.states import MARK_EVERY, SNAPSHOTS, States
from adaptive.engines.state_checkpoints import CHECKPOINTS, REMEMBER_BEFORE
from adaptive.errors import AdaptiveError
from adaptive.pair import Pair, load_pair
from adaptive.settings import load_settings
from adaptive.types import Message, SamplingParams, StopParams
from cli.main import app

TOKENS = 48
# Two logits closer than this are a tie: passes over one token and over several round differently, and keys and values
# are kept in 16 bits. The logits of these models have a standard deviation above 1.
TIE = 0.02
KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]


def save_hybrid(folder: Path, layers: int, **changes: Any) -> Path:
    """A Qwen 3.5 checkpoint with the bundled tokenizer: the first ``layers`` of four layers with random weights. The
    first two contribute most of the output, so that two layers can draft for four."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 2048, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **changes,
    }  # fmt: skip
    torch.manual_seed(3)
    whole = Qwen3_5ForCausalLM(Qwen3_5TextConfig(num_hidden_layers=len(KINDS), layer_types=KINDS, **sizes))
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name == "lm_head.weight":
                parameter.mul_(8.0)
            elif "layers" in name and parameter.ndim == 2:
                parameter.mul_(8.0 if "layers.0." in name or "layers.1." in name else 4.0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(num_hidden_layers=layers, layer_types=KINDS[:layers], **sizes))
    weights = whole.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and files of a pair."""
    folder = tmp_path_factory.mktemp("hybrid")
    for name, layers in (("target", 4), ("draft", 2)):
        write(save_hybrid(folder / name, layers), folder / f"{name}.gguf", "f32")
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    names = {"target": str(folder / "target.gguf"), "draft": str(folder / "draft.gguf")}
    return load_pair(load_settings({**names, "draft_checkpoint": str(folder / "draft"), "threads": 1}))


@pytest.fixture(scope="module")
def target(pair: Pair) -> LlamaCppEngine:
    assert isinstance(pair.target, LlamaCppEngine)
    return pair.target


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Number of tokens fed to each file's model, by the file's name."""
    found: dict[str, int] = {}
    run = LlamaCppSequence._run

    def counted(sequence: LlamaCppSequence, tokens: list[int], rows: int) -> torch.Tensor:
        name = sequence.engine.llama.path.stem
        found[name] = found.get(name, 0) + len(tokens)
        return run(sequence, tokens, rows)

    monkeypatch.setattr(LlamaCppSequence, "_run", counted)
    return found


def near(got: torch.Tensor, right: torch.Tensor, tolerance: float = 3e-3) -> None:
    torch.testing.assert_close(got / right.abs().max(), right / right.abs().max(), rtol=0, atol=tolerance)


def same_but_for_ties(output: list[int], prompt: list[int], file: Path) -> None:
    """The output is llama.cpp's own plain decoding up to its end, or up to a tie of two tokens."""
    alone, logits = decode_alone(file, prompt, len(output))
    for ours, theirs, row in zip(output, alone, logits, strict=True):
        if ours != theirs:
            assert row[theirs] - row[ours] < TIE
            return


def ask(assistant: Assistant, *messages: Message, tokens: int = TOKENS) -> Any:
    for _ in assistant.chat(messages, SamplingParams(), StopParams(tokens, ignore_eos=True)):
        pass
    assert assistant.last is not None
    return assistant.last


@pytest.mark.parametrize(
    ("changes", "encoding", "tolerance"),
    [
        ({}, "f32", 3e-3),
        ({"linear_num_key_heads": 1, "tie_word_embeddings": True}, "f32", 3e-3),
        ({"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2}, "f32", 3e-3),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "f32", 3e-3),
        ({}, "bf16", 0.1),
        ({}, "q8_0", 0.1),
    ],
    ids=["grouped", "one key head, tied", "a value head a key head", "half a rotation", "bf16", "q8_0"],
)
def test_a_written_file_predicts_what_its_checkpoint_does(
    changes: dict[str, Any], encoding: Any, tolerance: float, tmp_path: Path
) -> None:
    checkpoint = save_hybrid(tmp_path / "model", 4, **changes)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokens = torch.randint(6, 4000, (90,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    sequence = engine(write(checkpoint, tmp_path / "model.gguf", encoding)).sequence()
    found = [sequence.extend(tokens[:60], 60).clone()]
    found += [sequence.extend(tokens[n : n + 1], 1).clone() for n in range(60, 80)]
    found.append(sequence.extend(tokens[80:], 10))
    near(torch.cat(found), expected, tolerance)
    assert (torch.cat(found).argmax(-1) == expected.argmax(-1)).float().mean() > (0.98 if encoding == "f32" else 0.8)


def test_of_a_checkpoint_with_vision_the_language_model_is_written(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    changes = {"vocab_size": len(tokenizer), "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    model = several_kinds("qwen3_5_text", "qwen3_5", changes, **VISION["qwen3_5"])
    model.save_pretrained(tmp_path / "seeing")
    tokenizer.save_pretrained(tmp_path / "seeing")
    names = ("--target", str(tmp_path / "seeing"), "--draft", str(tmp_path / "seeing"))
    done = CliRunner().invoke(app, ["export", str(tmp_path / "gguf"), "--encoding", "f32", "--json", *names])
    assert done.exit_code == 0, done.output
    tokens = torch.arange(10, 70)
    with torch.inference_mode():
        expected = model(input_ids=tokens[None]).logits[0]
    near(engine(Path(json.loads(done.stdout)["target"])).sequence().extend(tokens, 60), expected)


def test_delta_nets_that_llama_cpp_does_not_compute_are_refused(tmp_path: Path) -> None:
    checkpoint = save_hybrid(tmp_path / "model", 1, linear_value_head_dim=32)
    with pytest.raises(AdaptiveError, match="keys of 16 numbers and values of 32"):
        write(checkpoint, tmp_path / "model.gguf", "f32")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize("length", [1, 4, 9, 20])
def test_greedy_output_equals_llama_cpp_alone(
    pair: Pair, target: LlamaCppEngine, prompts: list[str], fed: dict[str, int], length: int
) -> None:
    assert target.undraftable is None
    assert not [warning for warning in pair.warnings if "alone" in warning or "plainly" in warning]
    drafted = accepted = rejections = 0
    for prompt in prompts[::7]:
        assistant, message = Assistant(pair, FixedLength(length), None), Message("user", prompt)
        before = dict(fed)
        last = ask(assistant, message)
        read = encode_chat(pair, (message,))
        same_but_for_ties(last.output, read, target.llama.path)
        rounds = last.rounds
        drafted, accepted = drafted + sum(r.drafted for r in rounds), accepted + sum(r.accepted for r in rounds)
        rejections += sum(r.accepted < r.drafted for r in rounds)
        if length <= SNAPSHOTS:  # snapshots suffice for rollbacks, so each token is fed to the target once
            assert fed["target"] - before.get("target", 0) == len(read) + sum(1 + r.drafted for r in rounds)
        # The draft is fed the accepted tokens behind its mark again, and once everything since its prompt's checkpoint.
        most = len(read) + sum(2 + r.drafted + r.accepted for r in rounds) + REMEMBER_BEFORE + MARK_EVERY
        assert fed["draft"] - before.get("draft", 0) <= most
    assert rejections > 5
    assert length <= SNAPSHOTS or any(r.drafted - r.accepted > SNAPSHOTS for r in rounds)
    assert 0.05 < accepted / drafted < 0.95


def test_edited_and_regenerated_turns_go_on_from_a_checkpoint(
    pair: Pair, target: LlamaCppEngine, prompts: list[str]
) -> None:
    assistant = Assistant(pair, FixedLength(4), None)
    first = Message("user", prompts[0] + " " + prompts[5])
    said = Message("assistant", ask(assistant, first).text)
    for chat, kept in (
        ((first,), True),  # regenerated
        ((first, said, Message("user", prompts[2])), True),
        ((first, said, Message("user", prompts[3])), True),  # an edited message
        ((first, Message("assistant", "No."), Message("user", prompts[3])), True),  # an edited answer
        ((first,), True),
        ((Message("user", prompts[4]),), False),
    ):
        last = ask(assistant, *chat)
        read = encode_chat(pair, chat)
        same_but_for_ties(last.output, read, target.llama.path)
        if kept:
            beginning = len(encode_chat(pair, (first,)))
            assert last.timings.cached_n >= beginning - REMEMBER_BEFORE - 1
    held = assistant.conversations.memory
    assert held.states > 0
    assert 0 < held.checkpoints * (1 + SNAPSHOTS) <= CHECKPOINTS * held.states


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 24), st.booleans(), st.integers(0, 24)), min_size=1, max_size=12),
    st.integers(0, 2**31),
)
def test_rollback_leaves_what_never_having_seen_the_rest_would(
    target: LlamaCppEngine, moves: list[tuple[int, bool, int]], seed: int
) -> None:
    """Passes over several tokens, as prompts and as verifications, and single steps, each rolled back partly or
    further."""
    generator = torch.Generator().manual_seed(seed)
    sequence, text = target.sequence(), [5, 6, 7]
    for appended, verifies, removed in moves:
        new = torch.randint(3, target.vocab_size, (appended,), generator=generator).tolist()
        fed = text[sequence.length :] + new
        text = text + new
        if appended % 5 == 0:  # token by token, as a draft does
            for token in fed:
                sequence.extend([token], 1)
            certain = 0
        else:
            sequence.extend(fed, len(new) if verifies else 1)
            certain = len(new) - 1
        text = text[: max(1, len(text) - removed)]
        sequence.rollback(len(text))
        assert sequence.length <= len(text)
        if removed <= min(certain, SNAPSHOTS):
            assert sequence.length == len(text)
    probe = torch.randint(3, target.vocab_size, (3,), generator=generator).tolist()
    fresh = target.sequence()
    fresh.extend(text, 0)
    near(sequence.extend(text[sequence.length :] + probe, 3), fresh.extend(probe, 3))


def test_what_the_library_itself_takes_back_wrongly_would_be_seen(
    target: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library rolls back as many tokens as it has snapshots, even to snapshots of passes that were overwritten."""
    tokens = [5 + 7 * n % 900 for n in range(40)]

    def taken_back() -> None:
        sequence, fresh = target.sequence(), target.sequence()
        sequence.extend(tokens[:20], 1)
        for token in tokens[20:26]:
            sequence.extend([token], 1)
        sequence.rollback(22)
        fresh.extend(tokens[:22], 0)
        near(sequence.extend(tokens[sequence.length : 30], 5), fresh.extend(tokens[22:30], 5))

    taken_back()

    def trusting(states: States, context: object, count: int) -> None:
        states._last = states.snapshots

    monkeypatch.setattr(States, "ended", trusting)
    with pytest.raises(AssertionError):
        taken_back()


def test_steps_are_marked_once_they_have_been_taken_back(target: LlamaCppEngine) -> None:
    sequence, text, held = target.sequence(), list(range(10, 40)), []
    for _ in range(3):
        sequence.extend(text[sequence.length :], 1)
        for token in range(50, 56):
            sequence.extend([token], 1)
        text += [50, 51]
        sequence.rollback(len(text))
        held.append(sequence.length)
    assert held == [30 - REMEMBER_BEFORE, 32, 34]  # the prompt's checkpoint, then where the steps of each turn began


def test_a_pass_is_marked_once_one_has_been_taken_back_as_a_whole(target: LlamaCppEngine) -> None:
    """As in rounds that measure costs."""
    sequence, text, held = target.sequence(), list(range(10, 50)), []
    sequence.extend(text, 1)
    for _ in range(3):
        sequence.extend([*text[sequence.length :], 7, 8, 9], 3)
        sequence.rollback(len(text))
        held.append(sequence.length)
    assert held == [len(text) - REMEMBER_BEFORE, len(text), len(text)]


def test_an_interrupted_pass_is_forgotten(target: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence, fresh = target.sequence(), target.sequence()
    tokens = [5 + 7 * n % 900 for n in range(40)]
    sequence.extend(tokens, 1)

    def interrupted(context: object, batch: object) -> int:
        decode(context, batch)
        raise KeyboardInterrupt

    decode = sequence._decode
    monkeypatch.setattr(sequence, "_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sequence.extend([7, 8, 9], 3)
    monkeypatch.undo()
    assert sequence.length == len(tokens) - REMEMBER_BEFORE  # the prompt's checkpoint
    fresh.extend(tokens, 0)
    near(sequence.extend([*tokens[sequence.length :], 50, 51], 2), fresh.extend([50, 51], 2))


def test_a_copied_prefix_is_continued_as_the_text_it_came_from(target: LlamaCppEngine) -> None:
    tokens = [5 + 7 * n % 1000 for n in range(700)]
    one, other = target.sequence(), target.sequence()
    one.extend(tokens, 1)
    for length in (700, 699, 684, 683, 0):
        other.copy_prefix(one, length)
        assert other.length == (700 if length == 700 else 684 if length >= 684 else 0)
        fresh = target.sequence()
        fresh.extend(tokens[:length], 0)
        probe = [3, 4, 5]
        near(other.extend(tokens[other.length : length] + probe, 3), fresh.extend(probe, 3))
    other.copy_prefix(one, 700)
    one.reserve(3000)  # its state moves to a larger context
    near(one.extend([3, 4], 2), other.extend([3, 4], 2))
    one.rollback(690)
    assert one.length == 684


def test_an_adapter_predicts_as_peft_does(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    drafting = engine(folder / "draft.gguf")
    tokens = torch.randint(6, 4000, (120,), generator=torch.Generator().manual_seed(0))
    adapter = save_random_adapter(folder / "draft", tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32)
    with torch.inference_mode():
        plain = model(tokens[None]).logits[0].argmax(-1)
        learned = PeftModel.from_pretrained(model, str(adapter))(tokens[None]).logits[0]
    for _ in drafting.swap_adapter(adapter):  # applied beside the weights
        pass
    near(drafting.sequence().extend(tokens, len(tokens)), learned, 0.01)
    drafting.apply_adapter(adapter)  # merged into the weights
    assert drafting.running is not drafting.llama
    near(drafting.sequence().extend(tokens, len(tokens)), learned, 0.01)
    assert (plain == learned.argmax(-1)).float().mean() < 0.9  # otherwise the adapter would prove nothing


def write_mamba(file: Path) -> Path:
    """A model of recurrent layers alone, with random weights and without a tokenizer."""
    import gguf

    width, inner, states, rank, kernel, vocab = 64, 128, 8, 4, 4, 300
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "mamba")
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(vocab)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(states)
    writer.add_ssm_time_step_rank(rank)
    writer.add_tokenizer_model("no_vocab")
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    for block in ("blk.0", "blk.1"):
        tensors |= {
            f"{block}.attn_norm.weight": (width,), f"{block}.ssm_in.weight": (2 * inner, width),
            f"{block}.ssm_conv1d.weight": (inner, kernel), f"{block}.ssm_conv1d.bias": (inner,),
            f"{block}.ssm_x.weight": (rank + 2 * states, inner), f"{block}.ssm_dt.weight": (inner, rank),
            f"{block}.ssm_dt.bias": (inner,), f"{block}.ssm_a": (inner, states), f"{block}.ssm_d": (inner,),
            f"{block}.ssm_out.weight": (width, inner),
        }  # fmt: skip
    for name, shape in tensors.items():
        values = 0.3 * rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, -np.exp(values) if name.endswith("ssm_a") else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_an_architecture_that_keeps_no_snapshots_decodes_plainly_and_says_so(tmp_path: Path) -> None:
    plain = LlamaCppEngine(LlamaModel(write_mamba(tmp_path / "mamba.gguf")), frozenset(), 1)
    assert plain.undraftable is not None
    assert "(mamba)" in plain.undraftable
    tokens = [5 + 7 * n % 250 for n in range(60)]
    sequence, fresh = plain.sequence(), plain.sequence()
    sequence.extend(tokens, 1)
    for token in (3, 4, 5):
        sequence.extend([token], 1)
    sequence.rollback(50)  # another answer
    assert sequence.length == len(tokens) - REMEMBER_BEFORE
    fresh.extend(tokens[:50], 0)
    near(sequence.extend([*tokens[sequence.length : 50], 9, 8], 2), fresh.extend([9, 8], 2))
