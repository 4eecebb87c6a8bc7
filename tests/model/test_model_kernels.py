"""The model with the Triton kernels against the same model without: prefill, padding, packing, training, generation.

On a GPU in bfloat16 too; on a CPU in Triton's interpreter, float32, short texts, one KDA and one MLA layer.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import kimi_k3
from kimi_k3 import demo
from kimi_k3.kernels import dispatch

pytest.importorskip("triton")

pytestmark = pytest.mark.one_release

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
FOLDERS = ["k3_dense_flat", "kimi_linear_flat"]
LENGTH = 300 if ON_GPU else 35  # more than one chunk of KDA


@pytest.fixture(params=FOLDERS)
def folder(request, data_dir):
    return data_dir / request.param


@pytest.fixture
def both_ways(monkeypatch):
    """Results of a function with the kernels and without; the first run must have asked for them."""

    def run(function):
        results = []
        for refusal in (None, "switched off"):
            asked = []
            answer = lambda *tensors, sizes=(), refusal=refusal, asked=asked: asked.append(1) or refusal  # noqa: E731
            monkeypatch.setattr(dispatch, "triton_refusal", answer)
            results.append(function())
            assert asked
        return results

    return run


def load(folder, dtype):
    """The checkpoint on a GPU; else two layers of its configuration: the interpreter takes seconds a layer.

    Their weights are large, so that every token matters.
    """
    if ON_GPU:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE).eval()
    given = AutoConfig.from_pretrained(folder)
    linear = given.linear_attn_config | {"kda_layers": [1], "full_attn_layers": [2]}
    cut = {"num_hidden_layers": 2, "linear_attn_config": linear, "initializer_range": 0.2}
    cut |= {"attn_res_block_size": 1} if given.attn_res_block_size else {}
    torch.manual_seed(0)
    return kimi_k3.KimiK3ForCausalLM(kimi_k3.KimiK3TextConfig(**given.to_dict() | cut)).to(dtype).eval()


def rms_ratio(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def random_ids(model, *shape):
    torch.manual_seed(0)
    return torch.randint(3, model.config.vocab_size, shape, device=DEVICE)


@torch.no_grad()
def test_prefill_and_padded_batches(folder, both_ways):
    model = load(folder, torch.float32)
    both, mask = random_ids(model, 2, LENGTH), padding(LENGTH)
    for ids, attention_mask in ((both[:1], None), (both, mask)):
        got, expected = both_ways(lambda ids=ids, mask=attention_mask: model(ids, attention_mask=mask).logits)
        real = mask.bool() if attention_mask is not None else slice(None)
        assert rms_ratio(got[real], expected[real]) < 1e-4


def padding(length):
    mask = torch.ones(2, length, dtype=torch.int64, device=DEVICE)
    mask[0, :7] = 0
    mask[1, -5:] = 0
    return mask


def training_step(model, ids):
    """Loss and every gradient of two documents in one row."""
    positions = torch.cat([torch.arange(13), torch.arange(ids.shape[1] - 13)])[None].to(DEVICE)
    model.train().zero_grad()
    loss = model(ids, position_ids=positions, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def rounding_of(grads):
    """Size of a gradient that is zero: the first mix over depth has one source, whatever its query and norm."""
    return 1e-7 * torch.stack([grad.double().norm() for grad in grads.values()]).norm()


def test_packed_training_step(folder, both_ways):
    model = load(folder, torch.float32)
    ids = random_ids(model, 1, LENGTH)
    (loss, grads), (expected_loss, expected_grads) = both_ways(lambda: training_step(model, ids))
    assert rms_ratio(loss, expected_loss) < 1e-4
    assert grads.keys() == expected_grads.keys()
    rounding = rounding_of(expected_grads)
    for name, grad in grads.items():
        expected = expected_grads[name]
        assert (grad - expected).norm() < 5e-4 * expected.norm() + rounding, name


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: bfloat16 products are wrong in the interpreter")
def test_bfloat16_is_as_near_to_float32_as_the_torch_path(data_dir, both_ways):
    """Logits of a padded batch and gradients of packed documents; dense, so that no rounding moves a token's expert."""
    folder = data_dir / "k3_dense_flat"
    truth, model = load(folder, torch.float32), load(folder, torch.bfloat16)
    ids, mask = random_ids(model, 2, LENGTH), padding(LENGTH)
    real = mask.bool()
    with torch.no_grad():
        expected = truth(ids, attention_mask=mask).logits[real]
        got, torch_path = both_ways(lambda: model(ids, attention_mask=mask).logits[real])
    assert rms_ratio(got, expected) < 1.3 * rms_ratio(torch_path, expected)
    _, expected_grads = training_step(truth, ids[:1])
    (_, grads), (_, torch_grads) = both_ways(lambda: training_step(model, ids[:1]))
    rounding = rounding_of(expected_grads)
    for name, expected in expected_grads.items():
        off, torch_off = ((found[name].double() - expected).norm() for found in (grads, torch_grads))
        assert off < 1.5 * torch_off + 5e-3 * expected.norm() + rounding, name


@pytest.mark.parametrize(
    ("name", "cache"),
    [("k3_dense_flat", "dynamic"), ("kimi_linear_flat", "static")],
)
@torch.no_grad()
def test_greedy_text_of_a_padded_batch(name, cache, data_dir, both_ways):
    model = load(data_dir / name, torch.float32)
    ids = random_ids(model, 2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {
        "max_new_tokens": 12 if ON_GPU else 3 if cache == "static" else 2,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    got, expected = both_ways(lambda: model.generate(ids, attention_mask=mask, **options))
    assert torch.equal(got, expected)


@torch.no_grad()
def test_rollback_after_a_draft(folder, both_ways):
    """The step kernel runs a draft of several tokens; taking some back leaves the state of those that stay."""
    model = load(folder, torch.float32)
    ids = random_ids(model, 1, 20)

    def draft():
        cache = kimi_k3.HybridCache(model.config)
        cache.activate_past_recording()
        model(ids[:, :10], **{kimi_k3.CACHE_ARGUMENT: cache})
        model(ids[:, 10:15], **{kimi_k3.CACHE_ARGUMENT: cache})
        cache.crop(-3)
        return model(ids[:, 12:16], **{kimi_k3.CACHE_ARGUMENT: cache}).logits

    got, expected = both_ways(draft)
    assert rms_ratio(got, expected) < 1e-4
    assert rms_ratio(got, model(ids[:, :16]).logits[:, 12:]) < 1e-4


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: hundreds of tokens")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_the_small_checkpoint_says_the_same(dtype, both_ways):
    folder = Path(kimi_k3.__file__).parent / "checkpoints" / "small"
    model, tokenizer = load(folder, dtype), AutoTokenizer.from_pretrained(folder)
    text = tokenizer.decode(tokenizer((folder / "sample.txt").read_text(encoding="utf-8")).input_ids[:700])
    prompt = demo.insert_fact(text, "The secret number of Rowena is 70392.", 0.5) + demo.QUESTION.format(name="Rowena")
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(DEVICE)
    got, expected = both_ways(lambda: model.generate(ids, max_new_tokens=8, do_sample=False))
    assert torch.equal(got, expected)
    assert "70392" in tokenizer.decode(got[0, ids.shape[1] :])


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: compiled for it")
@torch.no_grad()
def test_one_graph_under_torch_compile(folder):
    model = load(folder, torch.float32)
    ids = random_ids(model, 1, LENGTH)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert rms_ratio(compiled(ids).logits, model(ids).logits) < 1e-5


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@torch.no_grad()
def test_a_captured_decode_step(data_dir):
    """A static cache's step replayed as a CUDA graph gives the logits of the same steps run one by one.

    Of a dense model: the experts' torch reference counts tokens on the host.
    """
    model = load(data_dir / "k3_dense_flat", torch.float32)
    ids = random_ids(model, 2, 16)
    expected = model(ids).logits
    cache = kimi_k3.HybridCache(model.config, max_length=32)
    model(ids[:, :8], **{kimi_k3.CACHE_ARGUMENT: cache})
    token = ids[:, 8:9].clone()
    kept = cache.snapshot()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(token, **{kimi_k3.CACHE_ARGUMENT: cache})
    torch.cuda.synchronize()
    cache.restore(kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(token, **{kimi_k3.CACHE_ARGUMENT: cache}).logits
    cache.restore(kept)
    for t in range(8, 16):
        token.copy_(ids[:, t : t + 1])
        graph.replay()
        assert rms_ratio(logits[:, 0], expected[:, t]) < 1e-4
