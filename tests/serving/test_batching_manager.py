"""transformers' interface of continuous batching: its own `generate_batch`, its manager's calls, trl's rollouts."""

import asyncio
import functools

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

import tiny
from kimi_k3.serving.batching import BatchEngine
from kimi_k3.serving.manager import KimiK3BatchingManager

PROMPTS = [[5, 9, 3], list(range(10, 40)), [7], [8, 8, 60, 2, 9]]


@functools.cache
def model():
    return tiny.model("kmk", **tiny.NO_SPECIAL).double()


def greedy(**changes) -> GenerationConfig:
    return GenerationConfig(do_sample=False, max_new_tokens=6, **changes)


@functools.cache
def alone(prompt: tuple[int, ...], **changes) -> list[int]:
    ids = torch.tensor([prompt])
    return model().generate(ids, generation_config=greedy(**changes))[0, len(prompt) :].tolist()


def test_generate_batch_gives_every_text_as_alone():
    config = ContinuousBatchingConfig(return_logprobs=True, max_batch_tokens=16)
    net = model().train()  # as trl leaves it between two steps
    outputs = net.generate_batch(PROMPTS, greedy(), continuous_batching_config=config, record_timestamps=True)
    assert list(outputs) == ["req_0", "req_1", "req_2", "req_3"]
    for prompt, output in zip(PROMPTS, outputs.values(), strict=True):
        assert output.is_finished() and output.error is None and output.prompt_ids == prompt
        assert output.generated_tokens == alone(tuple(prompt)) and len(output.timestamps) == 6
        with torch.no_grad():
            logits = net(torch.tensor([[*prompt, *output.generated_tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs, dtype=torch.float64), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.one_release
def test_a_text_ends_at_its_end_token():
    text = alone(tuple(PROMPTS[0]))
    end = text[3]
    (output,) = model().generate_batch(PROMPTS[:1], greedy(eos_token_id=[end, 70])).values()
    assert output.generated_tokens == text[: text.index(end) + 1]


@pytest.mark.one_release
def test_several_answers_to_a_prompt_are_drawn_apart():
    drawn = GenerationConfig(do_sample=True, max_new_tokens=6, num_return_sequences=3, temperature=2.0)
    config = ContinuousBatchingConfig(seed=4)
    first, again = (model().generate_batch(PROMPTS[:2], drawn, continuous_batching_config=config) for _ in range(2))
    texts = [tuple(output.generated_tokens) for output in first.values()]
    assert texts == [tuple(output.generated_tokens) for output in again.values()]
    assert len(set(texts)) == len(texts) >= 2


def test_the_calls_of_a_manager():
    """Streams, cancellation, requests of other lengths and rules, results by name, a pause, another session."""
    manager = model().init_continuous_batching(greedy())
    assert isinstance(manager, KimiK3BatchingManager) and not manager.is_running()
    assert manager.add_request(PROMPTS[0], request_id="early") == "early"  # waits for the start
    manager.start()
    assert manager.get_result("early", timeout=60).generated_tokens == alone(tuple(PROMPTS[0]))
    with manager.pause():
        streamed = manager.add_request(PROMPTS[1], streaming=True, max_new_tokens=4)
        left = manager.add_request(PROMPTS[2], max_new_tokens=500)
        manager.cancel_request(left)
    seen = [output.generated_tokens for output in manager.request_id_iter(streamed)]
    expected = alone(tuple(PROMPTS[1]))
    assert seen[:4] == [expected[:n] for n in (1, 2, 3, 4)] and seen[-1] == expected[:4]
    wrong = manager.add_request(PROMPTS[0], temperature=-1.0)
    failed = manager.get_result(wrong, timeout=60)
    assert failed.is_finished() and "temperature" in failed.error
    manager.stop(keep_for_next_session=True)
    assert not manager.is_running() and model().init_continuous_batching() is manager
    (output,) = model().generate_batch(PROMPTS[:1], greedy(), persistent_manager=True).values()
    assert output.generated_tokens == alone(tuple(PROMPTS[0]))
    model().destroy_cached_continuous_batching_manager()
    assert model().init_continuous_batching() is not manager


@pytest.mark.one_release
def test_results_come_to_a_loop():
    manager = model().init_continuous_batching(greedy())
    manager.start()

    async def ask():
        found, ended = [], asyncio.Event()

        def take(output):
            found.append(output)
            if output.is_finished():
                ended.set()

        manager.register_result_handler("mine", take)
        manager.add_request(PROMPTS[3], request_id="mine")
        await asyncio.wait_for(ended.wait(), 600)
        return found

    assert [output.generated_tokens for output in asyncio.run(ask())] == [alone(tuple(PROMPTS[3]))]
    manager.stop()


@pytest.mark.parametrize("setting", [{"num_beams": 2}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[3]]}])
def test_what_a_batch_cannot_do_is_refused_by_name(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))}=.*is not supported where many requests"):
        model().init_continuous_batching(greedy(**setting))


@pytest.mark.one_release
def test_calls_without_a_seed_draw_apart():
    drawn = GenerationConfig(do_sample=True, max_new_tokens=8, temperature=3.0)
    texts = [[output.generated_tokens for output in model().generate_batch(PROMPTS, drawn).values()] for _ in range(2)]
    assert texts[0] != texts[1]


@pytest.mark.one_release
def test_whoever_asks_may_be_in_inference_mode_or_under_autocast():
    for mode in (torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            outputs = model().generate_batch(PROMPTS[:2], greedy())
        expected = [alone(tuple(prompt)) for prompt in PROMPTS[:2]]
        assert [output.generated_tokens for output in outputs.values()] == expected


@pytest.mark.one_release
def test_tokens_of_another_vocabulary_and_another_model_are_refused():
    (failed,) = model().generate_batch([[5, tiny.VOCABULARY]], greedy()).values()
    assert failed.generated_tokens == [] and f"from 0 to {tiny.VOCABULARY - 1}" in failed.error
    with pytest.raises(ValueError, match="is no Kimi K3 model with a head"):
        BatchEngine(model().model)
    with pytest.raises(ValueError, match="training mode"):
        BatchEngine(tiny.model("k", **tiny.NO_SPECIAL).train())
