"""lm-eval: our folder as its `hf` model without any code of ours in between, and the recall tasks it lists."""

import math
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import kimi_k3
from kimi_k3.eval import TASKS, ModelReader, Plan, Tokens, evaluate, harness, open_haystack
from kimi_k3.training import lora_targets

lm_eval = pytest.importorskip("lm_eval")
TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager
Instance = pytest.importorskip("lm_eval.api.instance").Instance
FOLDER = Path(kimi_k3.__file__).parent / "eval" / "tasks"


@pytest.fixture(scope="module")
def checkpoint(data_dir, tmp_path_factory):
    """A folder with our code in it, as `save_pretrained` writes it, and a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("remote") / "model"
    letters = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol.isascii()]
    vocabulary = ["<unk>", "<pad>", "<|end|>", "Ċ", "Ġ", *sorted(letters)]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model = AutoModelForCausalLM.from_pretrained(data_dir / "k3_dense_flat", dtype=torch.float32)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<pad>").save_pretrained(folder)
    return folder


def test_every_task_has_its_yaml_and_the_harness_scores_as_we_do(checkpoint, tmp_path):
    """Fault 128: through the harness's public API alone, at two batch sizes."""
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    assert {f"kimi_k3_{name}" for name in TASKS} <= set(manager.all_tasks)
    tokens = Tokens(PreTrainedTokenizerFast.from_pretrained(checkpoint))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    plan = Plan(("palindrome", "stack"), (700,), depths=1, samples=1, seed=3)
    lines = evaluate(ModelReader(model, tokens), tokens, open_haystack(["noise"], tokens), plan, tmp_path)
    for batch in (1, 4):
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(checkpoint), "trust_remote_code": True, "dtype": "float32"},
            tasks=["kimi_k3_palindrome", "kimi_k3_stack"],
            task_manager=TaskManager(
                include_path=str(FOLDER),
                include_defaults=False,
                metadata={
                    "pretrained": str(checkpoint),
                    "length": 700,
                    "depths": 1,
                    "samples": 1,
                    "seed": 3,
                    "haystack": "noise",
                },
            ),
            batch_size=batch,
            device="cpu",
            bootstrap_iters=0,
        )
        for name in plan.tasks:
            asked = [sample["doc"]["prompt"] for sample in found["samples"][f"kimi_k3_{name}"]]
            ours = [line for line in lines if line["task"] == name]
            assert len(asked) == len(ours) and all(tokens.count(prompt) == 700 for prompt in asked)
            mean = sum(line["score"] for line in ours) / len(ours)
            assert math.isclose(found["results"][f"kimi_k3_{name}"]["recall,none"], mean)


@pytest.mark.one_release
@pytest.mark.parametrize("part", ["attention", "experts"])
def test_an_adapter_of_a_folder_acts(part, checkpoint, data_dir, tmp_path):
    """`--model_args pretrained=FOLDER,peft=ADAPTER`: its log-probability of a text is that of the adapted model."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    folder, adapter = tmp_path / "base", tmp_path / "adapter"
    model = AutoModelForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    tokenizer.save_pretrained(folder)
    parts = dict.fromkeys(("attention", "dense", "experts", "shared", "latent"), False) | {part: True}
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **lora_targets(model, **parts))).eval()
    adapted.save_pretrained(adapter)
    context, answer = (tokenizer(text, return_tensors="pt").input_ids for text in ("some words", " follow"))
    ids = torch.cat([context, answer], dim=1)

    def log_probability():
        with torch.no_grad():
            logits = adapted(input_ids=ids).logits[0, context.shape[1] - 1 : -1]
        # the harness cuts the vocabulary to the words of the tokenizer where an adapter is given
        return logits[:, : len(tokenizer)].log_softmax(-1).gather(-1, answer[0, :, None]).sum().item()

    expected = log_probability()
    with adapted.disable_adapter():
        assert abs(log_probability() - expected) > 0.01
    read = huggingface.HFLM(pretrained=str(folder), peft=str(adapter), dtype="float32", device="cpu")
    ((found, _),) = read.loglikelihood([Instance("loglikelihood", {}, ("some words", " follow"), 0)])
    assert found == pytest.approx(expected, abs=1e-3)


def test_the_command_hands_over_to_the_harness_with_our_tasks(monkeypatch):
    seen = []
    harness_command = type("Command", (), {"load": staticmethod(lambda: lambda: seen.append(list(sys.argv)))})
    monkeypatch.setattr(harness, "entry_points", lambda **wanted: [harness_command])
    monkeypatch.setattr(sys, "argv", ["harness", "--tasks", "kimi_k3_fact"])
    harness.main()
    assert seen == [["harness", "--tasks", "kimi_k3_fact", "--include_path", str(FOLDER)]]
    monkeypatch.setattr(harness, "entry_points", lambda **wanted: [])
    with pytest.raises(SystemExit, match=r"pip install 'kimi-k3\[eval\]'"):
        harness.main()
