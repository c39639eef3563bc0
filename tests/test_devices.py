"""The device of a model, and its default dtype."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, PreTrainedConfig

from adaptive.devices import choose_device
from adaptive.engines import load
from adaptive.engines.cpu import dtype, weights
from adaptive.engines.load import choose_dtype
from adaptive.errors import AdaptiveError
from adaptive.settings import load_settings


def config(kind: type[PreTrainedConfig], architecture: str) -> PreTrainedConfig:
    """The config of a checkpoint of this class."""
    made = kind()
    made.architectures = [architecture]
    return made


def test_an_unknown_device_is_refused_with_the_names_that_can_be_given() -> None:
    with pytest.raises(AdaptiveError, match=r"^there is no device gpu; give auto, cpu, cuda, cuda:1 or mps$"):
        choose_device("gpu")


@pytest.mark.parametrize("multiplied", [True, False])
def test_bfloat16_is_for_what_is_multiplied_in_it(
    multiplied: bool, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What torch multiplies depends on the processor.
    monkeypatch.setattr(weights, "packs", lambda kind, device: multiplied)
    known, unknown = config(LlamaConfig, "LlamaForCausalLM"), config(GPT2Config, "GPT2LMHeadModel")
    own_home.mkdir()
    for one in (known, unknown):
        dtype.kept_dtype(one.get_text_config().hidden_size, own_home)
    measured = json.loads((own_home / dtype.FILE).read_text())
    (own_home / dtype.FILE).write_text(json.dumps(dict.fromkeys(measured, str(torch.bfloat16))))
    assert choose_dtype(load_settings({}), "cpu", known) == torch.bfloat16
    assert choose_dtype(load_settings({}), "cpu", unknown) == (torch.bfloat16 if multiplied else torch.float32)
    # An explicit setting is used as it is.
    assert choose_dtype(load_settings({"dtype": "bfloat16"}), "cpu", unknown) == torch.bfloat16


def test_a_mac_decodes_on_its_processor_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto") == "cpu"


@pytest.mark.parametrize("device", ["cuda:0", "mps"])
def test_a_gpu_without_bfloat16_computes_in_float16_unless_that_overflows(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, gemma = config(LlamaConfig, "LlamaForCausalLM"), config(Gemma3TextConfig, "Gemma3ForCausalLM")
    for has, expected in ((True, [torch.bfloat16] * 2), (False, [torch.float16, torch.float32])):
        # In place of a GPU that multiplies bfloat16 and one that does not.
        monkeypatch.setattr(load, "has_bfloat16", lambda where, has=has: has)
        assert [choose_dtype(load_settings({}), device, one) for one in (llama, gemma)] == expected
    monkeypatch.undo()
    assert load.has_bfloat16("cpu")  # by trying


def test_what_was_measured_once_is_kept(tmp_path: Path) -> None:
    """Later runs reuse the measured choice, so a busy moment cannot change their text. A damaged file is replaced by a
    new measurement."""
    here = tmp_path / "state"
    first = dtype.kept_dtype(64, here)
    assert not here.exists()  # reading the choice creates no state folder
    here.mkdir()
    for spoiled in (None, "{", "[]", '{"another machine": "torch.float16"}'):
        if spoiled is not None:
            (here / dtype.FILE).write_text(spoiled)
        assert dtype.kept_dtype(64, here) in (torch.float32, torch.bfloat16)
        kept = json.loads((here / dtype.FILE).read_text())
        assert ("another machine" in kept) is (spoiled is not None and "another" in spoiled)
        [mine] = [name for name in kept if "width 64" in name]
        for other in (torch.float32, torch.bfloat16):
            (here / dtype.FILE).write_text(json.dumps({**kept, mine: str(other)}))
            assert dtype.kept_dtype(64, here) == other
    assert first in (torch.float32, torch.bfloat16)


TRIAL = """
import resource
from adaptive.engines.cpu.dtype import fastest_dtype
fastest_dtype(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fastest_dtype(4096)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory has another unit elsewhere")
def test_choosing_a_dtype_takes_no_more_memory_for_a_wide_model() -> None:
    """Four layers, float32 and bfloat16, each as it is and packed. A whole layer of this width takes 270 MB."""
    done = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 4 * dtype.DTYPE_TRIAL
