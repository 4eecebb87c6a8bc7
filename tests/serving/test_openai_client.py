"""The calls of OpenAI's own client."""

import pytest
import torch

from kimi_k3 import KimiK3ForCausalLM
from running_server import PROMPT, SMALL, TALK, Running, chat_tokenizer, limits
from waiting import PATIENCE

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.one_release
KEY = "secret"


@pytest.fixture(scope="module")
def running():
    """In float64: no rounding of a batch's sums decides a token."""
    model = KimiK3ForCausalLM.from_pretrained(SMALL, dtype=torch.float32).double()
    server = Running(model, limits(), chat_tokenizer(), api_key=KEY)
    yield server
    assert server.stop()


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=running.address + "/v1", api_key=KEY, max_retries=0, timeout=PATIENCE) as client:
        yield client


def test_completions(client, running):
    options = {"model": "small", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    answer = client.completions.create(**options, n=2, logprobs=2, echo=True)
    expected = running.ask(max_tokens=8).json()["choices"][0]["text"]
    assert [choice.text for choice in answer.choices] == [PROMPT + expected] * 2
    told = answer.choices[1].logprobs
    assert "".join(told.tokens) == PROMPT + expected and told.token_logprobs[0] is None
    assert all(
        max(top.values()) >= own for top, own in zip(told.top_logprobs[1:], told.token_logprobs[1:], strict=True)
    )
    assert answer.usage.completion_tokens == 16 and answer._request_id == answer.id.removeprefix("cmpl-")
    parts = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected
    assert parts[-2].choices[0].finish_reason == "length" and parts[-1].usage.completion_tokens == 8
    several = client.completions.create(
        **{**options, "prompt": [PROMPT, "A boat"]}, extra_body={"top_k": 5, "min_p": 0.1}
    )
    assert several.choices[0].text == expected and several.choices[1].index == 1


def test_chats(client, running):
    options = {"model": "small", "messages": TALK, "temperature": 0, "max_completion_tokens": 8}
    expected = running.chat(TALK, max_tokens=8).json()["choices"][0]["message"]["content"]
    answer = client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=1, seed=3)
    assert [choice.message.content for choice in answer.choices] == [expected] * 2
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content).replace("<|bos|>", "") == expected
    assert all(token.top_logprobs[0].logprob == token.logprob <= 0 for token in content)
    parts = list(client.chat.completions.create(**options, stream=True))
    assert parts[0].choices[0].delta.role == "assistant" and parts[-1].choices[0].finish_reason == "length"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    with client.chat.completions.stream(**options) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == expected


def test_errors_and_models(client, running):
    assert [model.id for model in client.models.list()] == ["small"]
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="suffix is not supported"):
        client.completions.create(model="small", prompt="a", suffix="b")
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        client.chat.completions.create(model="small", messages=TALK, tools=[tool])
    with client.with_options(api_key="wrong") as stranger, pytest.raises(openai.AuthenticationError, match="API key"):
        stranger.completions.create(model="small", prompt="a")
