"""The server over real connections: answers, streams, limits, clients that go away, and its end."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
import torch

from kimi_k3 import KimiK3ForCausalLM
from kimi_k3 import __main__ as cli
from kimi_k3.serving import engine
from kimi_k3.serving.prefix_cache import PrefixCache
from running_server import PROMPT, SMALL, Running, limits
from waiting import PATIENCE, until


@pytest.fixture(scope="module")
def model():
    return KimiK3ForCausalLM.from_pretrained(SMALL, dtype=torch.float32)


@pytest.fixture(scope="module")
def running(model):
    server = Running(model, limits(body_bytes=20_000))
    yield server
    assert server.stop()


def greedy(running, prompt, count):
    ids = running.tokenizer(prompt, return_tensors="pt").input_ids
    output = running.model.generate(ids, max_new_tokens=count, do_sample=False)
    return running.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_greedy_answers_are_those_of_generate_streamed_or_not(running):
    expected = greedy(running, PROMPT, 24)
    answer = running.ask(max_tokens=24).json()
    assert answer["choices"][0]["text"] == expected and answer["choices"][0]["finish_reason"] == "length"
    text, events = running.stream(max_tokens=24, stream_options={"include_usage": True})
    assert text == expected and len(events) > 5
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    usage = events[-1]["usage"]
    prompt = len(running.tokenizer(PROMPT).input_ids)
    assert usage["completion_tokens"] == 24 and usage["prompt_tokens"] == prompt
    assert usage["prompt_tokens_details"]["cached_tokens"] == prompt - 1  # the first request kept it
    ids = running.tokenizer(PROMPT).input_ids
    assert running.ask(ids, max_tokens=24).json()["choices"] == answer["choices"]


@pytest.mark.one_release
def test_a_second_turn_is_found_in_the_prefix_cache(running):
    first = running.ask("Once there was a small boat", max_tokens=20).json()
    before = running.metric("kimi_k3_cached_tokens_total")
    text = "Once there was a small boat" + first["choices"][0]["text"]
    second = running.ask(text + " and then", max_tokens=5).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 1
    assert running.metric("kimi_k3_cached_tokens_total") == before + cached
    assert running.metric("kimi_k3_prefix_cache_bytes", tier="device") == running.cache.tiers[0].used > 0


@pytest.mark.one_release
def test_stop_texts_end_the_answer_and_are_not_in_it(running):
    whole = greedy(running, PROMPT, 40)
    stop = whole[12:15]
    expected = whole[: whole.index(stop)]
    answer = running.ask(max_tokens=40, stop=stop).json()["choices"][0]
    assert answer["text"] == expected and answer["finish_reason"] == "stop"
    text, events = running.stream(max_tokens=40, stop=["never said", stop])
    assert text == expected and events[-1]["choices"][0]["finish_reason"] == "stop"
    assert running.stream(max_tokens=40, stop=["never said at all"])[0] == whole


@pytest.mark.one_release
def test_a_seed_gives_the_same_sample_again(running):
    options = {"max_tokens": 20, "temperature": 1.0, "top_p": 0.9}
    one, two, other = (running.ask(seed=seed, **options).json()["choices"][0]["text"] for seed in (5, 5, 6))
    assert one == two != other


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not JSON"),
        (b"[1]", 400, "the body"),
        (b"\xff\xfe{}", 400, ""),
        ({"prompt": "a"}, 400, "model"),
        ({"model": "small"}, 400, "prompt"),
        ({"model": "other", "prompt": "a"}, 404, "no model 'other'"),
        ({"model": "small", "prompt": "a", "max_tokens": "5"}, 400, "max_tokens"),
        ({"model": "small", "prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"model": "small", "prompt": "a", "max_tokens": 201}, 400, "200 are allowed"),
        ({"model": "small", "prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"model": "small", "prompt": "a", "temperature": "NaN"}, 400, "temperature"),
        ({"model": "small", "prompt": "a", "top_p": 0}, 400, "top_p"),
        ({"model": "small", "prompt": "a", "n": 0}, 400, "n"),
        ({"model": "small", "prompt": ["a"] * 65, "n": 2}, 400, "130 texts, and 128 are allowed"),
        ({"model": "small", "prompt": "a", "logprobs": 21}, 400, "logprobs"),
        ({"model": "small", "prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ({"model": "small", "prompt": "a", "stream": "yes"}, 400, "stream"),
        ({"model": "small", "prompt": "a\ud800"}, 400, "surrogate"),
        ({"model": "\ud800", "prompt": "a"}, 404, "no model"),
        ({"model": "small", "prompt": "a", "\ud800": 1}, 400, "the body"),
        ({"model": "small", "prompt": ""}, 400, "empty"),
        ({"model": "small", "prompt": []}, 400, "empty"),
        ({"model": "small", "prompt": ["a", ""]}, 400, "empty"),
        ({"model": "small", "prompt": [[7], []]}, 400, "empty"),
        ({"model": "small", "prompt": ["a", 7]}, 400, "prompt"),
        ({"model": "small", "prompt": [5000]}, 400, "0 to 2047"),
        ({"model": "small", "prompt": [-1]}, 400, "0 to 2047"),
        ({"model": "small", "prompt": {"a": 1}}, 400, "prompt"),
        ({"model": "small", "prompt": [7] * 601}, 400, "600 are allowed"),
        ({"model": "small", "prompt": "a" * 20_000}, 413, "20,000 bytes"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_a_sentence(running, body, status, said):
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = running.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert said in response.json()["error"]["message"]


def test_other_addresses(running):
    assert running.client.get("/health").json() == {"status": "ok"}
    assert running.client.get("/ready").json() == {"status": "ready"}
    assert running.client.get("/v1/models").json()["data"][0]["id"] == "small"
    assert running.client.get("/nowhere").json()["error"]["message"]
    assert running.client.get("/v1/completions").status_code == 405


def before_a_token(monkeypatch, action):
    """Have the engine do `action(job)` before each token that it reads."""
    take = engine._Text.take

    def watched(text, choice):
        action(text.job)
        return take(text, choice)

    monkeypatch.setattr(engine._Text, "take", watched)


@pytest.mark.one_release
def test_many_clients_some_of_which_go_away(running, monkeypatch):
    """Answers of clients that stay equal those of one at a time; those that leave leave nothing behind."""

    def waits_for_the_departure(job):
        if job.max_tokens == 200 and job.tokens == 20:  # an answer that nobody reads to its end
            until(lambda: job.request.is_cancelled)

    before_a_token(monkeypatch, waits_for_the_departure)
    prompts = [f"{PROMPT} {word}" for word in ("near", "behind", "above", "before")]
    alone = {prompt: running.ask(prompt, max_tokens=12).json()["choices"][0]["text"] for prompt in prompts}
    before = running.metric("kimi_k3_requests_total", outcome="finished")

    def one(number):
        prompt = prompts[number % 4]
        if number % 5 == 0:
            body = {"model": "small", "prompt": prompt, "temperature": 0, "stream": True, "max_tokens": 200}
            with running.client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
            return None
        return prompt, running.stream(prompt, max_tokens=12)[0]

    with ThreadPoolExecutor(20) as pool:
        answers = [answer for answer in pool.map(one, range(20)) if answer is not None]
    assert len(answers) == 16 and all(text == alone[prompt] for prompt, text in answers)
    until(lambda: running.metric("kimi_k3_requests_total", outcome="cancelled") == 4)
    assert running.metric("kimi_k3_requests_total", outcome="finished") == before + 16
    assert running.metric("kimi_k3_waiting_requests") == 0
    until(running.is_idle)
    assert not running.cache.index.root.pins


@pytest.mark.one_release
def test_time_and_queue_are_limited(model, monkeypatch):
    """504 when a request takes too long, 429 when too many wait."""
    may_run = threading.Event()

    def takes_too_long(job):
        may_run.wait(PATIENCE)
        until(lambda: time.monotonic() > job.deadline)

    before_a_token(monkeypatch, takes_too_long)
    server = Running(model, limits(seconds=1.0, waiting=1), batch={"sequences": 1})
    may_run.set()
    response = server.ask(max_tokens=200)
    assert response.status_code == 504 and "1 seconds" in response.json()["error"]["message"]
    assert "error" in server.stream(max_tokens=200)[1][-1]
    may_run.clear()
    with ThreadPoolExecutor(6) as pool:
        codes = []
        for answered in as_completed([pool.submit(server.ask, max_tokens=200) for _ in range(6)]):
            codes.append(answered.result().status_code)
            if len(codes) == 4:  # nothing that was taken can be answered before: one runs and one waits
                assert codes == [429] * 4
                may_run.set()
    assert set(codes) == {429, 504}
    assert server.stop()


@pytest.mark.one_release
def test_a_stop_finishes_what_runs_and_writes_the_prefixes(model, tmp_path):
    server = Running(model, limits(), folder=tmp_path, disk_bytes=1 << 30)
    body = {"model": "small", "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.server.should_exit = True
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason": "length"' in rest[-2]
    assert server.stop()
    again = PrefixCache(model, 1 << 28, folder=tmp_path, disk_bytes=1 << 30, block=16, every=512)
    ids = server.tokenizer(PROMPT, return_tensors="pt").input_ids
    assert again.prefill(ids).hit == ids.shape[1] - 1
    again.close()


def test_command(tmp_path, capsys):
    assert cli.main(["serve", str(tmp_path / "none")]) == 2
    assert "no checkpoint folder" in capsys.readouterr().err
