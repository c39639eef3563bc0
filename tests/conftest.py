"""Real checkpoints and prompts that the tests share."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from quick_costs import QUICK, WHOLE, measure_by
from service_server import Server

from adaptive.engines.cpu import delta, kernels

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread in this process and in the processes that tests start: models this small get slower with more threads, and
# the workers of a parallel run would compete for the cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The only certificate authority that clients trust, since no test reaches another machine: each client of httpx reads
# the file anew, which with all public authorities takes 25 ms.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "authority.pem")

measure_by(QUICK)

# No test has a deadline: the machine may be busy.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Implement ``thorough(but="id")``: the parameter set ``id`` of the test stays in the ordinary run."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters and any(mark.kwargs.get("but") == parameters.id for mark in item.iter_markers("thorough")):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "thorough"]


def pytest_collection_finish() -> None:
    """Exclude the objects of all imports so far from garbage collection, which would scan them again and again."""
    gc.freeze()


BUNDLED = Path(__file__).resolve().parent.parent / "checkpoints" / "bundled"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the home, configuration and working folders into ``tmp_path``: no test touches the user's own state."""
    home = tmp_path / "home"
    monkeypatch.setenv("ADAPTIVE_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return home


@pytest.fixture
def whole_measurement() -> Iterator[None]:
    """Measure a pair's costs in this process as on people's machines."""
    measure_by(WHOLE)
    yield
    measure_by(QUICK)


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def adaptive(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command line in this process, as the console script does. Returns exit status, stdout and stderr."""
    from cli.main import run

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["adaptive", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Twenty real prompts, four of each of five kinds, that the bundled models were not trained on."""
    kinds = ("math", "code", "roleplay", "tools", "instructions")
    found = []
    for kind in kinds:
        lines = (BUNDLED / "prompts" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        found += [json.loads(line)["prompt"] for line in lines[:4]]
    return found


def save_random_pair(folder: Path, architecture: str, vocab_size: int | None = None) -> tuple[Path, Path]:
    """A target (4 layers) and a draft (1 layer) of random weights with the bundled tokenizer.

    Weights are scaled up so that logits are spread like a trained model's and the text is not one loop. The draft is
    the target without its last three layers, which add less than the first: two drafted tokens of three are accepted.
    """
    from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    common: dict[str, Any] = {
        "vocab_size": vocab_size or len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    classes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {}),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    }
    config_class, model_class, extra = classes[architecture]
    torch.manual_seed(1)
    target, draft = (model_class(config_class(num_hidden_layers=layers, **common, **extra)) for layers in (4, 1))
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if parameter.ndim == 2 and "layers" in name:
                parameter.mul_(10.0 if "layers.0." in name else 3.0)
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "target", folder / "draft"


def save_model_that_says(
    text: str, folder: Path, special: Sequence[str] = (), template: str | None = None, context: int = 2048
) -> Path:
    """Save a model whose answer to any prompt is ``text``. Each token determines the next one, so no token may occur
    twice. ``special`` adds special tokens, ``template`` replaces the chat template, ``context`` is in tokens."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template or tokenizer.chat_template
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    width = 64
    assert len(set(tokens)) == len(tokens) < width
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=context, tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        embedding, output = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()
        output.zero_()
        embedding[:, 0] = 1.0  # after any other token comes the first token of the answer
        for place, token in enumerate(tokens):
            output[token, place] = 10.0  # certain even when sampled
            embedding[token] = torch.eye(width)[place + 1]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_random_adapter(draft: Path, folder: Path, seed: int = 0, std: float = 0.05) -> Path:
    """Save a LoRA adapter of random weights for this draft. The default ``std`` changes the draft's predictions; ten
    times as much destroys them."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=std)
    peft_model.save_pretrained(folder)
    return folder


def save_head(target: Path, folder: Path, noise: float | None = None) -> Path:
    """Save a head for this target in its initial state: a copy of the target's last layer. ``noise`` adds normal noise
    to each weight matrix, of ``noise`` times the matrix's standard deviation."""
    from adaptive.engines.head.module import Head
    from adaptive.engines.head.parts import parts_of_folder

    head = Head(parts_of_folder(target), torch.float32)
    torch.manual_seed(2)
    if noise is not None:
        with torch.no_grad():
            for tensor in head.own().values():
                tensor.add_(noise * tensor.std() * torch.randn_like(tensor) if tensor.ndim == 2 else 0.0)
    folder.mkdir(parents=True)
    head.write(folder)
    return folder


@pytest.fixture(params=list(kernels.LIBRARIES))
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test once with each instruction set of the kernels."""
    if kernels.built(request.param) is None:
        pytest.skip("was not built: no C++ compiler, or it does not know these instructions")
    if request.param not in kernels.runnable():
        pytest.skip("this processor has other instructions")
    found = kernels.Library(request.param)
    for module in (kernels, delta):
        monkeypatch.setattr(module, "library", lambda: found)
    return str(request.param)


@pytest.fixture(params=["ours", "torch's"])
def linear_layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test once with our own kernels and once without them."""
    if request.param == "torch's":
        monkeypatch.setattr(kernels, "library", lambda: None)
    elif kernels.library() is None:
        pytest.skip("were not built, or this processor has other instructions")
    return str(request.param)


# Chat template of the ``dialects`` server: it renders tools, thinking and every role by its name.
TALKATIVE = (
    "{{ bos_token }}{% if tools %}<|system|>Tools: {{ tools | tojson }}. Call one by "
    '<tool_call>{"name": <name>, "arguments": <object>}</tool_call><|end|>{% endif %}'
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "<|end|>{% endfor %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}"
)
DIALECTS_KEY = "correct-horse"


@pytest.fixture(scope="session")
def dialects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the bundled pair whose chat template has tools and thinking, shared by the tests of all dialects."""
    target = tmp_path_factory.mktemp("talkative") / "Talkative-1B"
    target.mkdir()
    for file in (BUNDLED / "target").iterdir():
        if file.name != "chat_template.jinja":
            (target / file.name).symlink_to(file)
    (target / "chat_template.jinja").write_text(TALKATIVE, encoding="utf-8")
    pair = ("--target", str(target), "--draft", str(BUNDLED / "draft"))
    one = Server(tmp_path_factory.mktemp("dialects"), *pair, "--distill", "off", key=DIALECTS_KEY)
    try:
        yield one.wait_until_ready()
    finally:
        one.stop()
