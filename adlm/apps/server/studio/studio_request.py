"""The bodies of `POST /v1/trace` and `POST /v1/bound`: their fields and limits. Independent of models and HTTP."""

from pydantic import BaseModel, ConfigDict, Field

from adlm.apps.server.completion_request import Number, Text

MAX_SAMPLES = 1024


class TraceRequest(BaseModel):
    """A text with holes to fill in, and how."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Text = Field(max_length=1000)
    text: Text = Field(description="A text with holes: [MASK] is one token, [MASK*4] four.")
    sampler: Text | None = Field(default=None, max_length=100, description="Sampling algorithm (default: the model's).")
    steps: int | None = Field(default=None, ge=1, description="Number of sampling steps (default: the model's).")
    temperature: Number | None = Field(default=None, ge=0)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1, description="By default random.")


class BoundRequest(BaseModel):
    """A text without holes to score."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Text = Field(max_length=1000)
    text: Text = Field(min_length=1)
    samples: int = Field(
        default=128, ge=1, le=MAX_SAMPLES, description="Noisy versions of the text; one for autoregressive models."
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
