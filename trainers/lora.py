"""The LoRA adapter: attached to any decoder through PEFT, kept in memory, and written in PEFT's format."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from adaptive.errors import AdaptiveError, first_line
from trainers.recipe import Recipe, default_rank

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adaptive.engines.head.foreign import ForeignHead
    from adaptive.engines.head.module import Head

# LoRA's scale is ALPHA over the rank; `default_learning_rate` is valid for this value.
ALPHA = 32
AdapterState = dict[str, torch.Tensor]


def width_of(draft: PreTrainedModel | PeftModel | Head | ForeignHead) -> int:
    """Hidden size of the draft, which determines rank and learning rate."""
    return int(draft.config.get_text_config().hidden_size)


def default_learning_rate(width: int) -> float:
    """Peak learning rate of AdamW for a draft of this hidden size: 7.5e-4 (2000 / width)^0.78.

    The best rate of LoRA with alpha 32 hardly depends on the rank and falls with the width of the
    model; exponent and constant are the fit of Schulman et al. 2025 ("LoRA without regret"), times
    their factor of 1.5 for short runs, such as those on some hundred generations. 3.7e-3 at
    width 256, where 2.5e-3 learns less in the same steps and 1e-2 no more; 1.4e-3 at 896. Too high: the
    loss jumps on unusual batches. Too low: a run ends before it has learned.
    """
    return float(7.5e-4 * (2000 / width) ** 0.78)


# Models whose kernels use this layer's weight without calling the layer, so that PEFT forbids adapting it.
TAKES_WEIGHT = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
# Names that an expert's layers had before transformers kept all experts in one parameter. In a model with such a
# parameter PEFT maps these names to it, even where they name a dense layer, and its adapter cannot be merged here.
EXPERT_LAYERS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def linear_names(draft: PreTrainedModel | ForeignHead) -> list[str]:
    """Full names of the layers that get an adapter: every linear layer (Conv1D included) except the output embeddings
    and those that PEFT forbids. In a mixture of experts, layers with a name of EXPERT_LAYERS are left out. So are
    routers that are subclasses of a linear layer, because they return more than one result."""
    head = draft.get_output_embeddings()
    left_out = {"out_proj"} if draft.config.model_type in TAKES_WEIGHT else set()
    if any(name.endswith("experts.gate_up_proj") for name, _ in draft.named_parameters()):
        left_out |= EXPERT_LAYERS
    return [
        name
        for name, module in draft.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D))
        and not type(module).__name__.endswith("Router")
        and module is not head
        and name.rpartition(".")[2] not in left_out
    ]


def _shortened(names: list[str], everything: list[str]) -> list[str]:
    """Last parts of ``names`` (``q_proj``) if they select the same layers, since other programs expect this form."""
    short = {name.rsplit(".", 1)[-1] for name in names}
    same = {name for name in everything if name.rsplit(".", 1)[-1] in short} == set(names)
    return sorted(short) if same else names


def attach(draft: PreTrainedModel | ForeignHead, recipe: Recipe) -> PeftModel:
    """Attach a new adapter to ``draft``, at first without effect (B = 0)."""
    torch.manual_seed(recipe.seed)
    names = linear_names(draft)
    modules = dict(draft.named_modules())
    config = LoraConfig(
        task_type="CAUSAL_LM" if hasattr(draft, "generate") else None,  # a head alone is not a causal model
        r=recipe.rank or default_rank(width_of(draft)),
        lora_alpha=ALPHA,
        target_modules=_shortened(names, list(modules)),
        fan_in_fan_out=any(isinstance(modules[name], Conv1D) for name in names),
    )
    with _quiet():
        return get_peft_model(draft, config)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings about deprecated names that PEFT reads from transformers; the user cannot change them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def load(draft: PreTrainedModel | ForeignHead, folder: Path, trainable: bool = False) -> PeftModel:
    """Attach the adapter in ``folder`` to ``draft``. Raises AdaptiveError if it does not fit this draft."""
    try:
        with _quiet():
            model: PeftModel = PeftModel.from_pretrained(draft, str(folder), is_trainable=trainable)
    except Exception as error:  # wrong shapes, unknown layers, a damaged file: PEFT raises many kinds of errors
        raise AdaptiveError(f"adapter {folder.name} does not fit this draft: {first_line(error)}") from error
    return model


def remove(model: PeftModel) -> PreTrainedModel:
    """Return the plain draft, bit for bit the original: the adapter was never merged."""
    plain: Any = model.unload()
    return plain  # type: ignore[no-any-return]


def snapshot(model: torch.nn.Module) -> AdapterState:
    """A copy on the CPU of the adapter's weights; for a plain draft, of all weights (full fine-tuning)."""
    adapted = isinstance(model, PeftModel)
    state = get_peft_model_state_dict(model, save_embedding_layers=False) if adapted else model.state_dict()
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}


def restore(model: torch.nn.Module, state: AdapterState) -> None:
    """Restore the weights of a ``snapshot``."""
    if isinstance(model, PeftModel):
        set_peft_model_state_dict(model, state)
    else:
        model.load_state_dict(state)


def write(model: PeftModel, state: AdapterState, folder: Path) -> None:
    """Write ``adapter_model.safetensors`` (float32, as judged) and ``adapter_config.json`` into ``folder``."""
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.inference_mode, before = True, config.inference_mode
    config.save_pretrained(str(folder))
    config.inference_mode = before
