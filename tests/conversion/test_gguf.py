"""What conversion writes, in llama.cpp: its own converter, then its own logits.

Needs llama.cpp's source (the converter is in no package) and `pip install kimi-k3[gguf]`. `make test-gguf`, or:

    pip download --no-deps --no-binary :all: llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    KIMI_K3_LLAMA_CPP=llama_cpp_python-*/vendor/llama.cpp pytest tests/conversion/test_gguf.py

llama.cpp keeps keys and values in float16, which moves logits a little and decides near-ties of the router the other
way: prompts are chosen without any.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kimi_k3.conversion import Target, convert
from kimi_k3.kernels.mxfp4 import dequantize_mxfp4

LLAMA_CPP = os.environ.get("KIMI_K3_LLAMA_CPP", "")
pytestmark = [
    pytest.mark.one_release,
    pytest.mark.skipif(not LLAMA_CPP, reason="KIMI_K3_LLAMA_CPP does not name llama.cpp's source folder"),
]

# The converter recognises a pre-tokenizer by a hash of what it does to a text; this answers for ours.
CONVERTER = """
import sys
root, model, out = sys.argv[1:]
sys.path[:0] = [root, f"{root}/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
import convert_hf_to_gguf
sys.argv = ["convert_hf_to_gguf", model, "--outfile", out, "--outtype", "f32"]
convert_hf_to_gguf.main()
"""
TOKENS, NEW, VOCABULARY = 16, 24, 160


def to_gguf(folder: Path) -> Path:
    out = folder.with_suffix(".gguf")
    command = [sys.executable, "-P", "-c", CONVERTER, LLAMA_CPP, str(folder), str(out)]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return out


def give_tokenizer(folder: Path) -> None:
    """160 tokens that are all printable: llama.cpp's server reports no probabilities of a token without text."""
    letters = [chr(code) for code in range(33, 127)]
    merges = list(itertools.product("abcdefgh", "abcdefgh"))[: VOCABULARY - 3 - len(letters)]
    tokens = ["<pad>", "<bos>", "<eos>", *letters, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def serve(path: Path):
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(params)


def ask(server, ids, new=1):
    """The reported tokens after `ids`, greedily: each with the log-probabilities of the whole vocabulary."""
    request = {
        "prompt": ids,
        "n_predict": new,
        "n_probs": VOCABULARY,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": new > 1,
        "cache_prompt": False,
    }
    logprobs = server.handle_completions(request)["choices"][0]["logprobs"]
    return logprobs["content"] if logprobs else []


def prompt_without_near_ties(model) -> torch.Tensor:
    """Ids [1, T] at which no router is undecided between its last chosen and its first refused expert."""
    routers = [module for module in model.modules() if type(module).__name__ == "KimiK3TopkRouter"]
    margins = []

    def note(module, args, kwargs, output):
        hidden = args[0].flatten(0, -2).float()
        scores = torch.sigmoid(hidden @ module.weight.float().T) + module.e_score_correction_bias.float()
        chosen = scores.topk(model.config.get_text_config().num_experts_per_token + 1).values
        margins.append((chosen[:, -2] - chosen[:, -1]).min().item())

    hooks = [router.register_forward_hook(note, with_kwargs=True) for router in routers]
    for seed in range(200):
        ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
        margins.clear()
        model(ids)
        if min(margins, default=1.0) > 1e-3:
            break
    else:
        raise AssertionError("every prompt has a near-tie")
    for hook in hooks:
        hook.remove()
    return ids


@pytest.mark.parametrize(
    "folder, bound", [("k3_tiny_mxfp4", 0.05), ("k3_dense_flat", 0.01), ("kimi_linear_flat", 0.01)]
)
@torch.no_grad()
def test_logits_and_greedy_text(folder, bound, data_dir, tmp_path):
    """The same argmax at every position, log-probabilities within the bound, the same greedy text."""
    experts = None if folder == "k3_dense_flat" else "fp32"
    convert(data_dir / folder, tmp_path / "model", Target(expert_dtype=experts))
    give_tokenizer(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ids = prompt_without_near_ties(model)
    ours = model(ids).logits[0].log_softmax(-1)
    server = serve(to_gguf(tmp_path / "model"))
    compared = 0
    for position in range(TOKENS):
        for token in ask(server, ids[0, : position + 1].tolist()):
            theirs = torch.full((VOCABULARY,), float("nan"))
            for entry in token["top_logprobs"]:
                theirs[entry["id"]] = entry["logprob"]
            assert theirs.argmax() == ours[position].argmax(), position
            torch.testing.assert_close(theirs, ours[position], atol=bound, rtol=0)
            compared += 1
    assert compared >= TOKENS - 2, "positions at which the text would end are not reported"
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, suppress_tokens=[2])
    assert [token["id"] for token in ask(server, ids[0].tolist(), NEW)] == text[0, TOKENS:].tolist()


def test_packed_experts_reach_the_gguf_unchanged(data_dir, tmp_path):
    """llama.cpp repacks the codes and rounds activations to 8 bits; the weights are ours to the last bit."""
    sys.path.insert(0, f"{LLAMA_CPP}/gguf-py")
    gguf = pytest.importorskip("gguf")
    convert(data_dir / "k3_tiny_mxfp4", tmp_path / "model")
    give_tokenizer(tmp_path / "model")
    reader = gguf.GGUFReader(to_gguf(tmp_path / "model"))
    weights = load_file(tmp_path / "model" / "model.safetensors")
    names = {"w1": "gate", "w2": "down", "w3": "up"}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for layer, (matrix, name) in itertools.product(range(1, 7), names.items()):
        tensor = tensors[f"blk.{layer}.ffn_{name}_exps.weight"]
        theirs = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type))).view(8, 32, 32)
        for expert in range(8):
            base = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"
            ours = dequantize_mxfp4(weights[f"{base}_packed"], weights[f"{base}_scale"], torch.float32)
            assert torch.equal(theirs[expert], ours), base


def test_the_small_checkpoint_answers_in_llama_cpp(data_dir, tmp_path):
    """Fault 120: the vocabulary step runs on our tokenizer; packed experts of a trained model give the same answers."""
    sys.path.insert(0, f"{LLAMA_CPP}/gguf-py")
    gguf = pytest.importorskip("gguf")
    convert(data_dir.parent.parent / "checkpoints" / "small", tmp_path / "model")
    path = to_gguf(tmp_path / "model")
    tokens = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"]
    assert len(tokens.data) == 2048
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    for i in (0, 1, 2, 100, 2047):
        assert bytes(tokens.parts[tokens.data[i]]).decode() == tokenizer.convert_ids_to_tokens(i)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    server = serve(path)
    told = {"Rowena": "70392", "Nigel": "18845", "Imogen": "60013"}
    text = " ".join(f"The secret number of {name} is {number}." for name, number in told.items())
    for name, number in told.items():
        prompt = f"{text}\nQuestion: What is the secret number of {name}?\nAnswer:"
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        ours = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        request = {"prompt": ids[0].tolist(), "n_predict": 8, "samplers": ["top_k"], "top_k": 1, "cache_prompt": False}
        theirs = server.handle_completions(request)["choices"][0]["text"]
        assert theirs == tokenizer.decode(ours[0, ids.shape[1] :], skip_special_tokens=True) == f" {number}."
