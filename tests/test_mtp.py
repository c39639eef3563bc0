"""The multi-token head inside a target's checkpoint computes what transformers' module computes, and drafts exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BUNDLED, Command
from foreign_heads import MTP_TYPES, last_layer_becomes_head, save_with_mtp
from safetensors.torch import load_file, save_file
from test_head_engine import bound
from test_head_lossless import TOKENS, alone, as_if_new, said
from test_models import VISION, several_kinds
from transformers import AutoModelForCausalLM

from adaptive.assistant import Assistant, length_policy
from adaptive.control.policy import FixedLength
from adaptive.engines.head.engine import HeadEngine
from adaptive.engines.head.kinds import HAVE_MTP, HeadKind, mtp_weights
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.load import Source, load_engine
from adaptive.engines.load_head import load_head
from adaptive.errors import AdaptiveError
from adaptive.pair import Pair, grows_on, load_pair, pair_identity, sources, trained_draft
from adaptive.records.log import Log
from adaptive.settings import Settings, load_settings
from adaptive.types import Message, SamplingParams, StopParams

GREEDY = SamplingParams(temperature=0.0)
LENGTHS = ("1", "4", "9", "auto")


def settings_of(target: Path, draft: str | None = "mtp", **options: str) -> Settings:
    named = {} if draft is None else {"draft": draft}
    return load_settings({"target": str(target), "dtype": "float32", "device": "cpu", **named, **options})


def loaded(folder: Path) -> tuple[TransformersEngine, HeadEngine]:
    """A target and the head in its checkpoint."""
    settings = settings_of(folder)
    target = load_engine(Source("target", folder, "none"), settings, "cpu", lambda share: None)
    assert isinstance(target, TransformersEngine)
    return target, load_head(Source("mtp", folder, "none", head=HeadKind.MTP), settings, target)


class Reference:
    """transformers' own module over the same checkpoint, fed as its candidate generator feeds it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.modeling_layers import MtpModel

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        config.num_mtp_layers = 1
        if getattr(config, "layer_types", None):
            config.mtp_layer_types = ["full_attention"]
        inside = rf"^model\.layers\.{config.num_hidden_layers}\."
        monkeypatch.setattr(self.model, "_keys_to_ignore_on_load_unexpected", [r"^mtp\.", inside])
        self.head = MtpModel.from_pretrained(self.model, device_map={"": "cpu"}).eval()

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor, known: int) -> torch.Tensor:
        """Logits (n - 1, vocab) for a text (n,) whose first ``known`` tokens went through the target; later rows read
        the head's own features."""
        from transformers.cache_utils import MtpCache

        states = self.model(tokens[None, :known], output_hidden_states=True).hidden_states[-1]
        cache, places = MtpCache(config=self.head.config), torch.arange(len(tokens))[None]
        made = [
            self.head.forward_layer(0, states, places[:, 1 : known + 1], cache, input_ids=tokens[None, 1 : known + 1])
        ]
        for place in range(known + 1, len(tokens)):
            step = slice(place, place + 1)
            made.append(
                self.head.forward_layer(0, made[-1][:, -1:], places[:, step], cache, input_ids=tokens[None, step])
            )
        found: torch.Tensor = self.head._project_to_logits(torch.cat(made, 1))[0]
        return found


@pytest.mark.parametrize("model_type", MTP_TYPES)
def test_logits_equal_transformers_own_module(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_with_mtp(model_type, tmp_path, alike=False, vocab_size=256)
    target, head = loaded(folder)
    held, draft = bound(target, head)
    tokens = torch.randint(3, 256, (40,), generator=torch.Generator().manual_seed(2))
    known = 34
    held.extend(tokens[:known], 1)
    right = Reference(folder, monkeypatch).logits(tokens, known)
    scale = right.abs().max()
    found, done = [], 0
    for count in (1, 9, 1, 20, 1, 3, 1, 1, 3):  # the last passes read the head's own features
        found.append(draft.extend(tokens[done : done + count], count).clone())
        done += count
    assert done == draft.length == len(tokens)
    got = torch.cat(found)
    assert torch.equal(got[0], torch.zeros(256))  # the first position has no features before it
    torch.testing.assert_close(got[1:] / scale, right / scale, rtol=0, atol=1e-4)
    # Without this check the lines above would prove nothing: features before the final norm, or shifted, must differ.
    assert not torch.allclose(got[1:-1] / scale, right[1:] / scale, atol=0.05)
    monkeypatch.setattr(head.head, "of_target", lambda features: features)
    other = head.sequence_of(held).extend(tokens[: known + 1], known)
    assert not torch.allclose(other / scale, right[:known] / scale, atol=0.01)


def test_what_it_drafted_leaves_no_trace(tmp_path: Path) -> None:
    target, head = loaded(save_with_mtp("glm4_moe", tmp_path, vocab_size=256))
    held, draft = bound(target, head)
    tokens = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(3))
    held.extend(tokens[:40], 1)
    draft.extend(tokens[:45], 1)
    assert draft.length == 45
    held.extend(tokens[40:44], 1)
    draft.rollback(44)
    assert draft.length == 41
    again = draft.extend(tokens[41:45], 4).clone()
    fresh = head.sequence_of(held)
    right = fresh.extend(tokens[:45], 4)
    torch.testing.assert_close(again, right, rtol=0, atol=1e-4)
    other, copied = bound(target, head)
    other.copy_prefix(held, 44)
    copied.copy_prefix(draft, 43)
    assert copied.length == 43
    torch.testing.assert_close(copied.extend(tokens[43:45], 2), right[-2:], rtol=0, atol=1e-4)
    for length in (1, 0):
        copied.rollback(length)
        assert copied.length == length
        torch.testing.assert_close(copied.features(0, length), torch.zeros(length, head.feature_width))
        torch.testing.assert_close(copied.extend(tokens[length:45], 4), right, rtol=0, atol=1e-4)


@pytest.fixture(
    scope="module", params=[pytest.param("deepseek_v3", marks=pytest.mark.thorough), "glm4_moe", "qwen3_5_text"]
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Loaded with --draft auto, since these checkpoints have a head."""
    folder = save_with_mtp(request.param, tmp_path_factory.mktemp(request.param) / "target")
    found = load_pair(settings_of(folder, "auto"))
    assert found.draft is not None
    assert found.draft.name == "mtp"
    return found


@pytest.mark.parametrize("some", [pytest.param(1, marks=pytest.mark.long, id="twenty-prompts"), 10])
def test_greedy_output_equals_the_target_alone(pair: Pair, some: int, prompts: list[str]) -> None:
    most = TOKENS if some == 1 else 24
    wanted = alone(pair, prompts[::some], most)
    accepted = drafted = 0
    for length in LENGTHS:
        assistant = Assistant(pair, length_policy(load_settings({"draft_length": length})), None)
        for prompt, right in zip(prompts[::some], wanted, strict=True):
            assert said(assistant, [prompt], most=most) == [right]
            assert assistant.last is not None
            assert {outcome.drafter for outcome in assistant.last.rounds} <= {"mtp", "none"}
            accepted, drafted = accepted + assistant.last.accepted, drafted + assistant.last.drafted
    assert 0 < accepted < drafted, "nothing was accepted, or nothing taken back: this would test neither"


def test_a_conversation_goes_on_from_what_both_hold(pair: Pair, prompts: list[str]) -> None:
    plain = Assistant(Pair(pair.identity, pair.target, None, pair.tokenizer, ()), FixedLength(0), None)
    drafted = Assistant(pair, FixedLength(4), None, cache_bytes=2**28)
    stop = StopParams(max_new_tokens=20, ignore_eos=True)
    system = Message("system", "You answer in short sentences. " * 4)
    for prompt in prompts[:2]:
        messages = [system, Message("user", prompt)]
        for more in ("Go on.", "Say it again."):
            texts = [[step.token for step in one.chat(messages, GREEDY, stop)] for one in (plain, drafted)]
            assert texts[0] == texts[1]
            assert drafted.last is not None
            as_if_new(pair, drafted.conversations.take(drafted.last.committed))
            messages += [Message("assistant", drafted.last.text), Message("user", more)]


def test_auto_takes_the_head_that_the_checkpoint_has_and_grows_one_where_it_has_none(tmp_path: Path) -> None:
    folder = save_with_mtp("qwen3_5_text", tmp_path / "target", vocab_size=256)
    for draft in (None, "auto", "mtp"):
        settings = settings_of(folder, draft)
        small = sources(settings)[1]
        assert small is not None
        assert (small.id, small.head) == ("mtp", HeadKind.MTP)
        assert grows_on(settings) is None
        assert trained_draft(settings) == small
        assert pair_identity(settings).id.startswith("target--mtp-")
    assert sources(settings_of(folder, "none"))[1] is None
    assert sources(settings_of(folder, None, memory="1GB"))[1] == sources(settings_of(folder, None))[1]
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("mtp.")}
    save_file(tensors, file, metadata={"format": "pt"})
    assert sources(settings_of(folder, None))[1] is None
    assert grows_on(settings_of(folder, None)) is not None
    with pytest.raises(AdaptiveError, match=r"--draft mtp: the checkpoint of .* has no multi-token head that is known"):
        sources(settings_of(folder))
    with pytest.raises(AdaptiveError, match="--draft mtp: the checkpoint of"):
        sources(load_settings({"target": str(BUNDLED / "target"), "draft": "mtp"}))
    pytest.importorskip("llama_cpp")
    (tmp_path / "target.gguf").write_bytes(b"GGUF")
    with pytest.raises(AdaptiveError, match=r"--draft mtp reads the target's hidden states, and llama\.cpp gives none"):
        sources(settings_of(tmp_path / "target.gguf"))


def test_a_head_that_lacks_a_tensor_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = save_with_mtp("glm4_moe", tmp_path / "target")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if not n.endswith("2.hnorm.weight")}, file, metadata={"format": "pt"})
    with pytest.raises(
        AdaptiveError, match=r"the multi-token head in .* cannot be loaded \(.*hnorm.*\); name"
    ) as error:
        load_pair(settings_of(folder))
    assert "\n" not in str(error.value)


def test_of_a_checkpoint_with_vision_the_head_drafts_too(tmp_path: Path) -> None:
    changes = MTP_TYPES["qwen3_5_text"]
    model = several_kinds("qwen3_5_text", "qwen3_5", changes, **VISION["qwen3_5"])
    model.save_pretrained(tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    inner = re.compile(r"^model\.language_model\.")
    text = {inner.sub("model.", name): t for name, t in tensors.items() if "visual" not in name}
    (tmp_path / "text").mkdir()
    save_file(text, tmp_path / "text" / "model.safetensors")
    (tmp_path / "text" / "config.json").write_text(json.dumps(config["text_config"]))
    last_layer_becomes_head(tmp_path / "text", alike=True)
    text = load_file(tmp_path / "text" / "model.safetensors")
    named = {re.sub(r"^model\.", "model.language_model.", name): t for name, t in text.items()}
    vision = {name: t for name, t in tensors.items() if "visual" in name}
    assert vision
    save_file({**named, **vision}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config["text_config"] = json.loads((tmp_path / "text" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    heads = [loaded(folder) for folder in (tmp_path, tmp_path / "text")]
    tokens = torch.randint(3, 256, (20,), generator=torch.Generator().manual_seed(2))
    logits = []
    for target, head in heads:
        held, draft = bound(target, head)
        held.extend(tokens[:-1], 1)
        logits.append(draft.extend(tokens, 18).clone())
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)


def test_every_type_that_is_taken_to_have_one_was_tried() -> None:
    assert {"qwen3_5", "qwen3_5_moe", *MTP_TYPES} == HAVE_MTP
    assert mtp_weights(BUNDLED / "target") is None


def test_doctor_names_it(tmp_path: Path, adaptive: Command) -> None:
    folder = save_with_mtp("qwen3_5_text", tmp_path / "target")
    status, out, _ = adaptive("doctor", "--target", str(folder), "--dtype", "float32", "--device", "cpu", "--json")
    rows = {row["name"]: row["value"] for row in json.loads(out)["findings"]}
    assert status == 0
    assert rows["draft"].startswith("the multi-token head in the target's own checkpoint")
    assert rows["draft forward"] == "transformers' own (float32)"


@pytest.mark.thorough
def test_answers_are_recorded_as_its_own_and_states_are_kept(tmp_path: Path, adaptive: Command) -> None:
    """With the controller, whose costs are measured first."""
    folder = save_with_mtp("qwen3_5_text", tmp_path / "target")
    state = tmp_path / "state"
    models = ("--target", str(folder), "--dtype", "float32", "--device", "cpu", "--state-dir", str(state))
    for length in ("4", "auto"):
        asked = ("--draft-length", length, "--max-new-tokens", "24", "--temperature", "0", "--history", "off", "--json")
        status, out, errors = adaptive("generate", "Tell me a story about the sea.", *models, *asked)
        assert status == 0, errors
        assert json.loads(out)["timings"]["draft_n"] > 0
    kept = state / pair_identity(settings_of(folder)).id
    with Log(kept / "records.db") as log:
        rounds = [outcome for one in log.generations() for outcome in one.generation.rounds]
    assert {outcome.drafter for outcome in rounds} - {"none"} == {"mtp"}
    assert len(list(kept.glob("features/*"))) == 2
