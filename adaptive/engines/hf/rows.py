"""Gives a model as many rows in embedding and vocabulary projection as another program wants.

Most checkpoints have more rows than their tokenizer has tokens, and models of one family differ in that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def set_rows(model: PreTrainedModel, rows: int) -> None:
    """Cut or lengthen the embedding and the vocabulary projection of ``model``, and change its config. New rows are
    copies of the last one, so that a new token is never likelier than one that was there."""
    embedding: Any = model.get_input_embeddings()
    before = int(embedding.weight.shape[0])
    model.resize_token_embeddings(rows, mean_resizing=False)
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        for tensor in part.parameters(recurse=False):  # weight, and a bias if there is one
            tensor[before:] = tensor[min(before, rows) - 1]
