"""trl's SFTTrainer with packing, and a LoRA on the experts, on a packed MXFP4 model."""

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.training import lora_targets

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")


def test_packed_sft_with_adapters_on_everything(data_dir, tmp_path):
    """The loss is that of the documents alone: what trl packs is kept apart.

    The text class also reads this multimodal folder; trl asks a model for a backbone without a head.
    """
    words = [f"w{i}" for i in range(150)]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<pad>", "<eos>", *words])}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    generator = torch.Generator().manual_seed(0)
    texts = [" ".join(words[i] for i in torch.randint(150, (n,), generator=generator)) for n in (9, 17, 30, 12) * 4]
    model = KimiK3ForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.float32)
    settings = trl.SFTConfig(
        str(tmp_path),
        packing=True,
        packing_strategy="bfd",
        max_length=64,
        per_device_train_batch_size=1,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        model,
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, **lora_targets(model)),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) > 1, "several documents in a row"
    documents = batch["input_ids"][0].tensor_split(starts[1:])
    with torch.no_grad():
        trainer.model.eval()
        total = sum(trainer.model(input_ids=d[None], labels=d[None]).loss * (len(d) - 1) for d in documents)
        packed = trainer.compute_loss(trainer.model, dict(batch))
    torch.testing.assert_close(packed, total / sum(len(d) - 1 for d in documents), rtol=1e-4, atol=0)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and all(torch.isfinite(torch.tensor(losses)))
    moved = [p for name, p in trainer.model.named_parameters() if "lora_gate_up_B" in name]
    assert len(moved) == 6 and all(p.any() for p in moved)
