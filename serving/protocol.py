"""Bodies of requests: the fields of OpenAI's completions and chat completions that are implemented, and vLLM's.

Others are refused by name unless they ask for nothing. null stands for the default.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from ..cli.generate import LEAST_TEMPERATURE
from .sampling import Sampling

LONGEST_STOP = 1000  # characters
MOST_LOGPROBS = 20  # of the highest ones, for each token
MOST_BIASES = 4096  # tokens of a logit_bias
MOST_CHOICES = 128  # texts that one request may ask for


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Fields):
    include_usage: bool = False


def refused(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", message)


_ALIKE = {bool: (bool,), int: (int, float)}  # JSON's 0 and 0.0 are one number, false is none


def _only(*values) -> Any:
    """A field that is not implemented: null and `values`, which change nothing, are accepted from clients that always
    send it."""

    def check(value):
        if value is None or any(
            value == known and type(value) in _ALIKE.get(type(known), (type(known),)) for known in values
        ):
            return None
        raise PydanticCustomError("not_supported", "is not supported here, only {values}", {"values": allowed})

    allowed = " and ".join(json.dumps(value) for value in (*values, None))
    return Annotated[Any, AfterValidator(check)]


def _or(default) -> BeforeValidator:
    """null is the default."""
    return BeforeValidator(lambda value: default if value is None else value)


def _bias(value: dict[str, float]) -> dict[int, float]:
    if len(value) > MOST_BIASES:
        raise refused(f"names at most {MOST_BIASES:,} tokens")
    if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in value):
        raise refused("names tokens by their ids")
    return {int(token): bias for token, bias in value.items()}


class Sampled(_Fields):
    """What both kinds of requests say of how their texts are made."""

    model: str
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), _or(1)] = 1
    temperature: Annotated[float, Field(ge=0, le=100), _or(1.0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), _or(1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1), _or(0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1), _or(0.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100), _or(1.0)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2), _or(0.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), _or(0.0)] = 0.0
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], AfterValidator(_bias), _or({})] = {}
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: Annotated[bool, _or(False)] = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # vLLM's, as the next one
    priority: Annotated[int, Field(ge=-100, le=100), _or(0)] = 0  # lower ones go first
    ignore_eos: _only(False) = None
    skip_special_tokens: _only(True) = None

    @field_validator("temperature")
    @classmethod
    def _can_divide(cls, value):
        if 0 < value < LEAST_TEMPERATURE:
            raise refused(f"must be 0, which is greedy, or at least {LEAST_TEMPERATURE:g}")
        return value

    @field_validator("stop")
    @classmethod
    def _can_stop(cls, value):
        texts = [value] if isinstance(value, str) else value or []
        if "" in texts:
            raise refused("an empty text would end every answer before its first word")
        if any(len(text) > LONGEST_STOP for text in texts):
            raise refused(f"a text to stop at has at most {LONGEST_STOP:,} characters")
        return texts

    def sampling(self, choice: int, log_probabilities: int | None) -> Sampling:
        """The rules of one of the `n` texts: each has a seed of its own."""
        return Sampling(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=None if self.seed is None else self.seed + choice,
            log_probabilities=log_probabilities,
        )


class CompletionRequest(Sampled):
    """`POST /v1/completions`. A prompt is a text or token ids, or a list of these."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0), _or(16)] = 16
    echo: Annotated[bool, _or(False)] = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: _only(1) = None
    suffix: _only() = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt

    @property
    def log_probabilities(self) -> int | None:
        return self.logprobs


class TextPart(_Fields):
    """Of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Fields):
    role: str
    content: str | list[TextPart]
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, value):
        for part in value if isinstance(value, list) else ():
            if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
                raise PydanticCustomError("not_supported", "{kind} is not supported here, only text", {"kind": kind})
        return value

    def plain(self) -> dict[str, str]:
        """As templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # as many as may follow
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # its newer name
    logprobs: Annotated[bool, _or(False)] = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: _only({"type": "text"}) = None
    tools: _only([]) = None
    tool_choice: _only("none", "auto") = None
    functions: _only([]) = None

    @field_validator("top_logprobs")
    @classmethod
    def _belongs_to_logprobs(cls, value, info):
        if value is not None and not info.data.get("logprobs"):
            raise refused('belongs to "logprobs": true')
        return value

    @property
    def log_probabilities(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
