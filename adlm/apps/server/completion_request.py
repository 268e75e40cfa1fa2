"""The body of `POST /v1/completions`: its fields and their limits. Independent of models and HTTP."""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from adlm.errors import UserError

Text: TypeAlias = Annotated[str, Field(strict=True)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
StopText: TypeAlias = Annotated[str, Field(min_length=1, max_length=1000)]

MAX_PROMPTS = 128


class RequestError(UserError):
    """A wrong request. `param` is the field that the message is about, None if it is about several."""

    def __init__(self, message: object, param: str | None):
        super().__init__(message)
        self.param = param


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and ignored."""


class CompletionRequest(BaseModel):
    """Fields of OpenAI's completions API, and `sampler` and `steps`. Other fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Text = Field(max_length=1000)
    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)] = Field(
        default="", description="One or several texts; [MASK] and [MASK*4] are holes to fill in."
    )
    suffix: Text | None = Field(default=None, description="Text after the completion: infilling.")
    max_tokens: int | None = Field(default=None, ge=1, description="Tokens to fill in after the prompt (default: 16).")
    temperature: Number | None = Field(default=None, ge=0)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    n: int = Field(default=1, ge=1, description="Completions of each prompt.")
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1, description="By default random.")
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] | None = None
    logprobs: int | None = Field(
        default=None, ge=0, le=5, description="If given, the log-probability each token was drawn with."
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    sampler: Text | None = Field(default=None, max_length=100, description="Sampling algorithm (default: the model's).")
    steps: int | None = Field(default=None, ge=1, description="Number of sampling steps (default: the model's).")
    user: Text | None = Field(default=None, description="Ignored.")
    echo: Literal[False] | None = Field(default=None, description="Not supported.")
    best_of: Literal[1] | None = Field(default=None, description="Not supported.")
    frequency_penalty: Literal[0] | Annotated[float, Field(ge=0, le=0)] | None = Field(
        default=None, description="Not supported."
    )
    presence_penalty: Literal[0] | Annotated[float, Field(ge=0, le=0)] | None = Field(
        default=None, description="Not supported."
    )
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = Field(
        default=None, description="Not supported."
    )

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []
