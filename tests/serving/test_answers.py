"""What the server answers beside plain texts: log-probabilities, several choices, chats, keys, names, and its end."""

import signal
import threading

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.serving.protocol import ChatRequest, CompletionRequest
from kimi_k3.serving.sampling import Choice, Sampling
from kimi_k3.serving.token_texts import TokenTexts
from running_server import PROMPT, SMALL, TALK, TEMPLATE, Running, chat_tokenizer, limits
from waiting import PATIENCE, until

pytestmark = pytest.mark.one_release


@pytest.fixture(scope="module")
def model():
    """In float64: no rounding of a batch's sums decides a token."""
    return KimiK3ForCausalLM.from_pretrained(SMALL, dtype=torch.float32).double()


@pytest.fixture(scope="module")
def running(model):
    server = Running(model, limits(new_tokens=40), chat_tokenizer(), batch={"step_tokens": 7})
    yield server
    assert server.stop()


def text_alone(running, ids, count):
    output = running.model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return output[0, len(ids) :].tolist()


def message(response):
    return response.json()["error"]["message"]


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["Ünder the naïve old tree — a house", [4, 200, 31, 77, 901, 5]])
def test_log_probabilities_of_prompt_and_answer_are_those_of_a_plain_forward(running, prompt):
    ids = prompt if isinstance(prompt, list) else running.tokenizer(prompt).input_ids
    whole = ids + text_alone(running, ids, 6)
    with torch.no_grad():
        expected = running.model(torch.tensor([whole])).logits[0].log_softmax(-1)
    answer = running.ask(prompt, max_tokens=6, echo=True, logprobs=3).json()["choices"][0]
    assert answer["text"] == running.tokenizer.decode(whole)
    told = answer["logprobs"]
    assert told["tokens"] == [running.tokenizer.decode([token]) for token in whole]
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    found = [row[token].item() for row, token in zip(expected, whole[1:], strict=False)]
    assert told["token_logprobs"][1:] == pytest.approx(found, abs=1e-9)
    for row, token, tops in zip(expected, whole[1:], told["top_logprobs"][1:], strict=False):
        highest = {}
        for other in (*row.topk(3).indices.tolist(), token):
            highest.setdefault(running.tokenizer.decode([other]), row[other].item())
        assert tops == pytest.approx(highest, abs=1e-9)
    for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
        assert "\N{REPLACEMENT CHARACTER}" in token or answer["text"][offset:].startswith(token)
    # the same in pieces, and of the prompt alone
    events = running.stream(prompt, max_tokens=6, echo=True, logprobs=3)[1]
    pieces = [choice["logprobs"] for event in events for choice in event["choices"]]
    assert {name: [each for piece in pieces for each in piece[name]] for name in told} == told
    scored = running.ask(prompt, max_tokens=0, echo=True, logprobs=3).json()
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["choices"][0]["logprobs"] == {name: values[: len(ids)] for name, values in told.items()}
    assert scored["choices"][0]["text"] == running.tokenizer.decode(ids)


def test_tokens_of_a_stop_text_are_not_told(running):
    """Nor is any token that begins behind the answer's text."""
    whole = running.ask(max_tokens=30, logprobs=0).json()["choices"][0]
    stop = whole["text"][12:15]
    text = whole["text"][: whole["text"].index(stop)]
    for stopped in (
        running.ask(max_tokens=30, logprobs=0, stop=stop).json()["choices"],
        running.stream(max_tokens=30, logprobs=0, stop=stop)[1],
    ):
        choices = [choice for event in stopped for choice in event.get("choices", [event])]
        offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
        assert "".join(choice["text"] for choice in choices) == text
        assert offsets == [offset for offset in whole["logprobs"]["text_offset"] if offset < len(text)]


def test_tokens_of_one_character_begin_where_it_does():
    tokenizer, text = AutoTokenizer.from_pretrained(SMALL), "a☃☃b"
    texts, ids = TokenTexts(tokenizer, start=10), tokenizer(text).input_ids
    told = [texts.add(Choice(token)) for token in ids]
    assert len(told) == 8, "every snowman has three tokens"
    assert [token.offset for token in told] == [10, 11, 11, 11, 12, 12, 12, 13]
    assert told[0].text + told[-1].text == "ab"


# --- several texts ---------------------------------------------------------------------------------------------------


def test_several_choices_of_several_prompts(running):
    """Each with its index; the choices of one prompt have seeds of their own, which are those of the next request."""
    options = {"max_tokens": 5, "temperature": 1.0, "seed": 5}
    prompts = [PROMPT, "A boat on the"]
    answer = running.ask(prompts, n=3, **options).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [*range(6)] and len({*texts}) == 6
    alone = [running.ask(each, **{**options, "seed": 5 + i}).json() for each in prompts for i in range(3)]
    assert texts == [each["choices"][0]["text"] for each in alone]
    read = sum(each["usage"]["prompt_tokens"] for each in alone) // 3
    assert answer["usage"]["prompt_tokens"] == read and answer["usage"]["completion_tokens"] == 6 * 5
    as_tokens = running.ask([running.tokenizer(each).input_ids for each in prompts], n=3, **options).json()
    assert as_tokens["choices"] == answer["choices"]
    streamed = [""] * 6
    events = running.events("/v1/completions", prompt=prompts, n=3, echo=True, **options)
    for choice in (choice for event in events for choice in event["choices"]):
        streamed[choice["index"]] += choice["text"]
    assert streamed == [prompts[i // 3] + text for i, text in enumerate(texts)]
    assert sum(choice["finish_reason"] == "length" for event in events for choice in event["choices"]) == 6


def test_every_field_of_sampling_reaches_it():
    fields = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3,
        "frequency_penalty": -0.4, "seed": 9,
    }  # fmt: skip
    for kind, body in ((CompletionRequest, {"prompt": "a"}), (ChatRequest, {"messages": TALK[:1]})):
        asked = kind(model="small", logit_bias={"7": -3.5}, **fields, **body)
        expected = Sampling(**{**fields, "seed": 11}, logit_bias={7: -3.5}, log_probabilities=4)
        assert asked.sampling(2, 4) == expected
        assert kind(model="small", **body).sampling(0, None) == Sampling(temperature=1.0)


def test_sampling_acts(running):
    greedy = running.ask(max_tokens=12).json()["choices"][0]["text"]
    for rule in ({"top_k": 1}, {"min_p": 1}, {"top_p": 1e-9}):
        assert running.ask(max_tokens=12, **{"temperature": 1, **rule}).json()["choices"][0]["text"] == greedy
    forced = running.tokenizer(" house").input_ids
    biased = running.ask(max_tokens=3, logit_bias={str(forced[0]): 100}).json()["choices"][0]["text"]
    assert biased == " house" * 3 and len(forced) == 1


# --- chats -----------------------------------------------------------------------------------------------------------


def test_a_chat_is_a_completion_of_the_rendered_messages(running):
    rendered = "<system> Be kind.\n<user> Who lives in the house?\n<assistant>"
    plain = running.ask(rendered, max_tokens=10, logprobs=2).json()["choices"][0]
    parts = [{**TALK[0], "content": [{"type": "text", "text": text} for text in ("Be ", "kind.")]}, TALK[1]]
    for messages, most in ((TALK, "max_tokens"), (parts, "max_completion_tokens")):
        answer = running.chat(messages, logprobs=True, top_logprobs=2, **{most: 10}).json()
        assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": plain["text"]}
        assert choice["finish_reason"] == "length"
        content = choice["logprobs"]["content"]
        assert [token["token"] for token in content] == plain["logprobs"]["tokens"]
        assert [token["logprob"] for token in content] == plain["logprobs"]["token_logprobs"]
        tops = [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in content]
        assert tops == plain["logprobs"]["top_logprobs"]
        told = "".join(bytes(token["bytes"]).decode() for token in content)
        assert told.replace("<|bos|>", "") == plain["text"]
    events = running.events(
        "/v1/chat/completions", messages=TALK, max_tokens=10, n=2, stream_options={"include_usage": True}
    )
    for index in range(2):
        own = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant" and own[-1]["finish_reason"] == "length"
        assert "".join(choice["delta"].get("content", "") for choice in own) == plain["text"]
    assert events[-1]["usage"]["completion_tokens"] == 20


def test_a_chat_without_a_limit_goes_to_the_servers(running):
    counted = running.chat(TALK).json()
    assert counted["usage"]["completion_tokens"] == 40 or counted["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "no role robot"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "image_url is"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "surrogate"),
        ({"messages": [{"role": "a\ud800", "content": "a"}]}, "surrogate"),
        ({"messages": [{"role": "user", "content": "a " * 601}]}, "600 are allowed"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is not supported"),
        ({"tool_choice": "required"}, "tool_choice is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 41}, "40 are allowed"),
        ({"echo": True}, "echo is not supported"),
    ],
)  # fmt: skip
def test_chats_that_cannot_work_are_refused_with_a_sentence(running, fields, said):
    answer = running.chat(**{"messages": TALK, **fields})
    assert answer.status_code == 400 and said in message(answer), answer.text


def test_a_chat_needs_a_template(running):
    running.tokenizer.chat_template = None
    try:
        answer = running.chat(TALK)
    finally:
        running.tokenizer.chat_template = TEMPLATE
    assert answer.status_code == 400 and "no chat template" in message(answer)


# --- who asks --------------------------------------------------------------------------------------------------------


def test_requests_have_names(running):
    """The client's where it gives one, in the header and the answer's id, in refusals too."""
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 1}
    for name, expected in (("my-name:1", "my-name:1"), ("a b", None), ("x" * 129, None), (None, None)):
        headers = {} if name is None else {"x-request-id": name}
        answers = [running.client.post("/v1/completions", json=each, headers=headers) for each in (body, {})]
        assert [answer.status_code for answer in answers] == [200, 400]
        for answer in answers:
            told = answer.headers["x-request-id"]
            assert told == expected if expected else len(told) == 32
        assert answers[0].json()["id"] == "cmpl-" + answers[0].headers["x-request-id"]


def test_a_key_is_asked_for(model):
    server = Running(model, limits(), api_key="söme key")
    stranger = httpx.Client(base_url=server.address, timeout=PATIENCE)
    for headers in (
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer some key"},
        {"authorization": "söme key"},
    ):
        headers = {name: value.encode() for name, value in headers.items()}
        for path in ("/v1/completions", "/v1/chat/completions", "/nowhere"):
            answer = stranger.post(path, content=b"{}" * 1000, headers=headers)
            assert answer.status_code == 401 and "API key" in message(answer)
            assert answer.headers["www-authenticate"] == "Bearer"
        assert [stranger.get(path, headers=headers).status_code for path in ("/v1/models", "/metrics")] == [401, 401]
        assert [stranger.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
    assert server.ask(max_tokens=1).status_code == 200
    stranger.close()
    assert server.stop()


# --- limits and the end ----------------------------------------------------------------------------------------------


def held(model):
    """(An event: a forward has begun; one without which it does not go on; the hook's handle)."""
    entered, may_run = threading.Event(), threading.Event()

    def hold(*args):
        entered.set()
        may_run.wait(PATIENCE)

    return entered, may_run, model.get_input_embeddings().register_forward_pre_hook(hold)


@pytest.mark.parametrize("stop_seconds", [PATIENCE, 1])
def test_a_signal_ends_the_server_behind_what_runs(model, stop_seconds):
    """New requests are told so; what runs ends, or is broken off when the time is over."""
    server = Running(model, limits(stop_seconds=stop_seconds))
    entered, may_run, handle = held(model)
    try:
        body = {"model": "small", "prompt": PROMPT, "temperature": 0, "max_tokens": 3, "stream": True}
        with httpx.Client(base_url=server.address, timeout=PATIENCE) as client:
            with client.stream("POST", "/v1/completions", json=body) as response:
                assert entered.wait(PATIENCE)
                server.server.handle_exit(signal.SIGTERM, None)
                assert server.client.get("/health").status_code == 200
                ready, refused = server.client.get("/ready"), server.ask()
                assert (ready.status_code, refused.status_code) == (503, 503)
                assert refused.headers["retry-after"] == "1" and "shutting down" in message(refused)
                if stop_seconds == 1:
                    until(lambda: server.batches._session.is_aborting)
                may_run.set()
                lines = [line for line in response.iter_lines() if line]
    finally:
        may_run.set()
        handle.remove()
    assert ('"finish_reason": "length"' if stop_seconds > 1 else "shutting down") in lines[-2]
    assert lines[-1] == "data: [DONE]"
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive() and server.is_idle()
    server.socket.close()


def test_gauges_say_what_runs_and_waits(model):
    server = Running(model, limits(waiting=2), batch={"sequences": 2, "tokens": 512})
    entered, may_run, handle = held(model)

    def gauges():
        return [server.metric(f"kimi_k3_{name}") for name in ("running_requests", "waiting_requests", "free_slots")]

    assert gauges() == [0, 0, 2] and server.metric("kimi_k3_free_pages") == 8
    answers = []
    threads = [threading.Thread(target=lambda n=n: answers.append(server.ask(n=n, max_tokens=4))) for n in (2, 3)]
    try:
        threads[0].start()
        assert entered.wait(PATIENCE)
        assert gauges() == [1, 1, 1], "one reads the prompt for both"
        threads[1].start()
        until(lambda: gauges() == [1, 4, 1])
        refused = server.ask()
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert server.metric("kimi_k3_free_pages") == 7
    finally:
        may_run.set()
        handle.remove()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(len({choice["text"] for choice in answer.json()["choices"]}) for answer in answers) == [1, 1]
    assert gauges() == [0, 0, 2] and server.is_idle()
    too_long = server.ask([7] * 400, max_tokens=200)
    assert too_long.status_code == 400 and "more than the 512" in message(too_long)
    assert server.stop()
