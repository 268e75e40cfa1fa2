"""`model.generate` of an exported model: masks after the prompt, filled in by `model.sample`.

Copied unchanged into exported folders as custom_generate/generate.py. `transformers` loads it with the model, if
`trust_remote_code` is true, in place of its own.
"""

from typing import Any

import torch


def generate(
    input_ids: Any, *, model: Any, attention_mask: Any = None, max_new_tokens: int = 32, **options: Any
) -> Any:
    """input_ids (B, L) and up to `max_new_tokens` tokens after each row; the options are those of `model.sample`."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError("attention_mask has zeros: prompts of unequal lengths are not supported; give one at a time")
    masks = input_ids.new_full((len(input_ids), max_new_tokens), model.config.mask_token_id)
    return model.sample(input_ids=torch.cat([input_ids, masks], dim=1), **options)
