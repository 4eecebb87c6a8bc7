"""A process that reads prompts, and another one that continues them from what it receives, layer by layer."""

import functools
import socket
import sys
import threading

import pytest
import torch

import tiny
from kimi_k3.serving.apart import Prefiller, Receiver
from kimi_k3.serving.batching import BatchEngine
from kimi_k3.serving.sampling import Sampler, Sampling
from kimi_k3.serving.scheduler import Request
from waiting import run_script

pytestmark = pytest.mark.one_release
PROMPTS = {"long": list(range(3, 63)), "two": [9, 4], "short": [5, 5, 60, 7, 11, 12, 30]}


@functools.cache
def net(seed=0):
    return tiny.model("kmkk", seed, **tiny.NO_SPECIAL).double()


def prefill_all(link, chunk):
    prefiller = Prefiller(net(), link, tokens=64, chunk=chunk)
    with pytest.raises(ValueError, match="2 to 65 tokens here, and this one 1"):
        prefiller.prefill("one", [4])
    for name, prompt in PROMPTS.items():
        prefiller.prefill(name, prompt)
    prefiller.close()
    return prefiller.sent_bytes


def test_another_process_goes_on_with_the_text():
    model, ended = net(), {}
    engine = BatchEngine(model, sequences=2, tokens=200)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        child = threading.Thread(
            target=run_script, args=(__file__, str(listening.getsockname()[1])), kwargs={"check": True}
        )
        child.start()
        link, _ = listening.accept()
        receiver = Receiver(model, link)
        for arrived in receiver:
            assert arrived.prompt == PROMPTS[arrived.name]
            sampler = Sampler(Sampling(temperature=0), arrived.prompt, frozenset())
            request = Request(arrived.prompt, 5, sampler, saved=arrived.saved)
            request.done = lambda request, name=arrived.name: ended.update({name: request})
            engine.submit(request)
        child.join()
    while engine.requests:
        engine.step()
    assert engine.fed_tokens == 3 * 5, "a prompt's last token and the new ones but the last"
    assert ended.keys() == PROMPTS.keys() and receiver.received_bytes > 0 and receiver.seconds > 0
    for name, request in ended.items():
        ids = torch.tensor([PROMPTS[name]])
        assert request.new == model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :].tolist()


def both_ends(ours, theirs):
    """What happens to a receiver with the one function while the other one speaks to it."""
    here, there = socket.socketpair()
    speaking = threading.Thread(target=theirs, args=(there,))
    speaking.start()
    try:
        return ours(here)
    finally:
        here.close()
        speaking.join()


def test_another_model_and_a_prefiller_that_dies_are_told():
    models = net(), net(seed=1)  # made before threads draw from one generator

    def of_another_model(link):
        with pytest.raises(ValueError, match="another model"):
            Prefiller(models[1], link, tokens=8)

    with pytest.raises(ValueError, match="another model"):
        both_ends(lambda link: Receiver(net(), link), of_another_model)

    def dies(link):
        prefiller = Prefiller(net(), link, tokens=64)
        layer = prefiller.pool.layer
        prefiller.pool.layer = lambda sequence, i, length: layer(sequence, i, length) if i < 2 else 1 / 0
        with pytest.raises(ZeroDivisionError):
            prefiller.prefill("lost", PROMPTS["short"])
        prefiller.close()

    with pytest.raises(ValueError, match="in the middle of lost"):
        both_ends(lambda link: list(Receiver(net(), link)), dies)


if __name__ == "__main__":
    torch.set_num_threads(1)
    prefill_all(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), chunk=16)
