"""The config of an exported model: the content of its config.json. Copied unchanged into every exported folder.

The sections data, model, schedule, time, anchor and sampling hold the options of the same names in adlm's own config.
"""

from typing import Any

from transformers import PretrainedConfig


class AdlmConfig(PretrainedConfig):  # type: ignore[misc]
    """Options of an anchored, masked diffusion or autoregressive language model."""

    model_type = "adlm"

    def __init__(
        self,
        method: str = "adlm",
        anchored: bool = True,
        causal: bool = False,
        length: int = 1024,
        vocab_size: int = 2,
        mask_token_id: int = 1,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        causal_weight: float = 0.0,
        tokenizer: str = "",
        data: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        schedule: dict[str, Any] | None = None,
        time: dict[str, Any] | None = None,
        anchor: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(**{"tie_word_embeddings": False, **kwargs})
        self.method, self.anchored, self.causal = method, anchored, causal
        self.length, self.vocab_size, self.mask_token_id = length, vocab_size, mask_token_id
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        self.causal_weight, self.tokenizer, self.data = causal_weight, tokenizer, data or {}
        self.model, self.schedule, self.time = model or {}, schedule or {}, time or {}
        self.anchor, self.sampling = anchor or {}, sampling or {}

    @property
    def max_position_embeddings(self) -> int:
        return self.length

    @property
    def hidden_size(self) -> int:
        return int(self.model["hidden"])

    @property
    def num_hidden_layers(self) -> int:
        """Blocks of the network, or of the anchor network if there are two."""
        return int(self.model["blocks"])

    @property
    def num_attention_heads(self) -> int:
        return int(self.model["heads"])
