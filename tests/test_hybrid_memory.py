"""Memory of a conversation with a hybrid model is bounded except for keys and values, and is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import BUNDLED
from service_server import Server
from test_recurrent import engine_of
from tiny_models import noisy, prompt_of, tiny_model
from transformers import AutoTokenizer

from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.delta import HELD
from adaptive.engines.state_checkpoints import CHECKPOINTS


@pytest.mark.thorough(but="our own forward")
@pytest.mark.parametrize("ours", [True, False], ids=["our own forward", "transformers'"])
def test_eight_thousand_tokens_take_no_more_states_than_two_thousand(ours: bool) -> None:
    if ours and kernels.library() is None:
        pytest.skip("the kernels are not built, or not for this processor")
    kinds = ["linear_attention", "full_attention"]
    model = tiny_model("qwen3_5_text", num_hidden_layers=2, layer_types=kinds, max_position_embeddings=8192)
    sequence, found = engine_of(model, ours).sequence(), []
    for turn in range(80):
        sequence.extend(prompt_of(92, turn), 1)
        held = sequence.length
        sequence.extend(prompt_of(9, turn), 9)
        sequence.rollback(held + 8)
        found.append(sequence.memory)
    assert sequence.length == 8000
    early, late = found[19], found[-1]
    assert late.states == early.states > 0
    assert late.checkpoints == early.checkpoints > 0
    assert late.features == 0
    key = 2 * 2 * 16 * 4  # of a token: keys and values of two heads of 16 numbers
    assert 8000 * key <= late.keys <= 1.6 * 8000 * key
    # Of a layer: its state, and the values kept for a token (the convolution's inputs, a key, changes and decays).
    state, row = 4 * 16 * 16 * 4, (2 * 2 * 16 + 4 * 16 + 2 * 16 + 4 * (16 + 1)) * 4
    assert late.checkpoints <= CHECKPOINTS * (state + 4 * row)
    assert late.states <= 2 * state + 2 * HELD * row


@pytest.mark.thorough
def test_slots_say_what_conversations_take(tmp_path: Path) -> None:
    """A real server of a tiny hybrid pair."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    model = tiny_model("qwen3_5_text", vocab_size=len(tokenizer), max_position_embeddings=1024)
    for name, part in (("target", model), ("draft", noisy(model))):
        part.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    given = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--distill", "off"]
    server = Server(tmp_path / "home", *given).wait_until_ready()
    try:
        with server.http() as http:
            asked = {"messages": [{"role": "user", "content": "Tell me of the river. " * 5}], "max_tokens": 8}
            assert http.post("/v1/chat/completions", json=asked).status_code == 200
            held = http.get("/slots").json()[0]["memory"]
    finally:
        server.stop()
    assert set(held) == {"keys_bytes", "states_bytes", "checkpoints_bytes", "features_bytes", "limit_bytes"}
    assert min(held["keys_bytes"], held["states_bytes"], held["checkpoints_bytes"]) > 0
    assert sum(held.values()) - held["limit_bytes"] <= held["limit_bytes"]
