"""The methods, one file each with the same interface: build, loss, bound, log_beliefs, generate."""

from adlm.config.load import validate
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.methods.method import Method
from adlm.registry import METHODS


def method_of(config: Config) -> Method:
    """The method that a Config names; the Config is validated."""
    method, config = METHODS[config.method], validate(config)
    if config.model.block_length:
        from adlm.methods.block_causal import block_causal

        method = block_causal(config)
    elif config.train.align_weight:
        raise UserError(
            f"train.align_weight {config.train.align_weight:g} is for block-causal adlm and mdlm, and "
            "model.block_length is 0; leave it out, or use method=mdlm model.block_length=4",
            "train.align_weight",
        )
    if config.train.planner and (not method.any_order or config.model.block_length or config.rates.rule != "none"):
        raise UserError(
            f"train.planner {config.train.planner:g} is for adlm and mdlm on whole rows, without rates; leave it out",
            "train.planner",
        )
    if config.rates.rule != "none":
        from adlm.methods.rates import rated

        method = rated(config)
    if config.model.memory:
        from adlm.methods.memory import remembering

        method = remembering(config)
    if config.model.chain and config.model.block_length < 2:
        raise UserError(
            f"model.chain {config.model.chain} is for text blocks of several tokens, and model.block_length is "
            f"{config.model.block_length}; use model.chain=0",
            "model.chain",
        )
    if config.model.chain and config.train.chain_target == "causal" and config.train.causal_weight == 0:
        raise UserError(
            "train.chain_target causal needs a trained causal copy, and train.causal_weight is 0; use "
            "train.causal_weight=0.5 or train.chain_target=text",
            "train.chain_target",
        )
    if config.sampling.anchor_every > 1:
        from adlm.methods.inputs import check_anchor_every

        check_anchor_every(config, config.sampling)
    if config.time.continuous_options and not method.any_order:
        name, default = next(iter(config.time.continuous_options.items()))
        raise UserError(
            f"time.{name} {getattr(config.time, name)} is for adlm and mdlm, not for {config.method}; use "
            f"time.{name}={default}",
            f"time.{name}",
        )
    if config.train.lora_rank > config.model.hidden:
        raise UserError(
            f"train.lora_rank {config.train.lora_rank} is above model.hidden {config.model.hidden}, the rank of the "
            f"matrices; give at most train.lora_rank={config.model.hidden}, or 0 to train all weights",
            "train.lora_rank",
        )
    if config.train.random_length and method.cached:
        kind = f"model.block_length {config.model.block_length}" if config.model.block_length else config.method
        raise UserError(
            f"train.random_length {config.train.random_length} is for methods that read whole rows, and {kind} writes "
            "from left to right without knowing the length; leave it out",
            "train.random_length",
        )
    return method(config)  # type: ignore[no-any-return]
