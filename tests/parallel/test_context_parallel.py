"""Rows cut over two processes on the CPU, against one process with the whole rows."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import kimi_k3
from kimi_k3.parallel import context_parallel, gather_cache, prefill, shard
from kimi_k3.parallel.context import bytes_sent
from kimi_k3.parallel.wire import Wire
from kimi_k3.training import QKClip, QuantileBalancer
from rounding import EXACT
from several import by_one
from waiting import PATIENCE, run_script

pytestmark = pytest.mark.one_release

LENGTH = 151  # the parts have 76 and 75 tokens
DIED = 7


def device():
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


def ids(rows=2):
    return torch.randint(3, 100, (rows, LENGTH), generator=torch.Generator().manual_seed(0)).to(device())


def documents(*rows):
    """position_ids [rows, LENGTH] of rows with documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


# One over the cut, one that ends with the first part, a row without any.
PACKED = documents((40, 70, 41), (76, 75))
UNEVEN = documents((LENGTH,), (3, 110, 38))
# Documents of which the part before holds fewer tokens than a convolution reads.
SHORT = documents((75, 76), (74, 2, 75), (74, 77), (73, 1, 1, 76))


def load(folder, dtype=torch.float64, attention="sdpa"):
    options = {"dequantize": True} if folder.name == "k3_tiny_mxfp4" else {}
    model = kimi_k3.KimiK3ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention, **options)
    return model.to(device(), dtype)  # float64 for the parameters that are float32 in any file, too


def of_whole_rows(model, batch):
    """Logits (None without), loss and gradients, on the CPU."""
    model.zero_grad()
    whole = model(**batch, use_cache=False)
    whole.loss.backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return None if whole.logits is None else whole.logits.detach().cpu(), whole.loss.detach().cpu(), gradients


def assert_as_one(model, bound=EXACT["atol"], rows=2, loss_chunk=None, **more):
    """Logits of this part (none with `loss_chunk`) and the gradients of all parts."""
    model.loss_chunk = loss_chunk
    more = {name: x.to(device()) for name, x in more.items()}
    batch = {"input_ids": ids(rows), "labels": ids(rows), **more}
    whole_logits, whole_loss, expected = by_one(lambda: of_whole_rows(model, batch))
    model.zero_grad()
    with context_parallel(model):
        part = shard(batch)
        out = model(**part, use_cache=False)
    out.loss.backward()
    if loss_chunk is None:
        logits = whole_logits.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]
        assert (out.logits.cpu() - logits).abs().max() < bound
    assert (out.logits is None) == (whole_logits is None) == (loss_chunk is not None)
    loss = out.loss.detach().clone()
    dist.all_reduce(loss)
    torch.testing.assert_close(loss.cpu(), whole_loss, rtol=1e-5, atol=1e-5)
    assert len(expected) > 50
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in expected), name
        if name in expected:
            dist.all_reduce(parameter.grad)
            error = (parameter.grad.cpu() - expected[name]).abs().max()
            assert error < bound * max(1, expected[name].abs().max()), (name, error)


def bytes_on_the_wire(data_dir):
    model, world, rank = load(data_dir / "k3_tiny_mxfp4", torch.float32).train(), dist.get_world_size(), dist.get_rank()
    part = shard({"input_ids": ids(), "labels": ids()})
    parts = [x.shape[1] for x in ids().tensor_split(world, dim=1)]
    with Wire() as forward, context_parallel(model):
        loss = model(**part, use_cache=False).loss
    with Wire() as backward:
        loss.backward()
    expected = bytes_sent(model.config, parts, rank, 2, 4)
    assert (forward.total, backward.total) == pytest.approx(expected, rel=1e-12)
    assert forward.total > 0 < backward.total


def logits_and_gradients(data_dir):
    model = load(data_dir / "k3_tiny_mxfp4").train()
    assert_as_one(model)
    assert_as_one(model, rows=6, position_ids=torch.cat([UNEVEN, SHORT]))
    model.gradient_checkpointing_enable()
    assert_as_one(model, position_ids=PACKED)
    assert_as_one(model, rows=1, cu_seq_lens_q=torch.tensor([0, 40, 110, LENGTH]))
    assert_as_one(load(data_dir / "k3_dense_flat", attention="eager").train(), position_ids=PACKED)
    assert_as_one(load(data_dir / "kimi_linear_flat").train())
    assert_as_one(load(data_dir / "kimi_linear_flat").train(), loss_chunk=50, position_ids=PACKED)


def adapters(data_dir):
    from peft import LoraConfig, get_peft_model

    from kimi_k3.training import lora_targets

    model = load(data_dir / "k3_dense_flat")
    torch.manual_seed(0)
    options = LoraConfig(r=2, init_lora_weights=False, **lora_targets(model, ["attention"]))
    assert_as_one(get_peft_model(model, options).double())


def balance(data_dir):
    """Every token is counted once: the biases are those of one process."""
    model, alone = load(data_dir / "k3_tiny_mxfp4").train(), load(data_dir / "k3_tiny_mxfp4").train()
    balancers = QuantileBalancer(model), QuantileBalancer(alone)
    with context_parallel(model):
        model(**shard({"input_ids": ids()}))
    alone(ids())
    if dist.get_rank():  # both processes have counted everything: one of them is enough
        balancers[1]._counts.zero_()
    for balancer in balancers:
        balancer.step()
    for (name, bias), expected in zip(model.named_buffers(), alone.named_buffers(), strict=True):
        assert bias.any() and torch.equal(bias, expected[1]), name
    clip = QKClip(model)  # the largest logit of a part is not that of the row
    with pytest.raises(ValueError, match="cut over processes"), context_parallel(model):
        model(**shard({"input_ids": ids()}))
    clip.close()


def generation(data_dir, dtype=torch.float64, close=EXACT):
    for folder in ("k3_tiny_mxfp4", "kimi_linear_flat"):
        model, prompt = load(data_dir / folder, dtype).eval(), ids()
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "do_sample": False}
        expected = model.generate(prompt, **options)
        cache = prefill(model, prompt)
        assert cache.get_seq_length() == LENGTH - 1
        assert torch.equal(model.generate(prompt, **{kimi_k3.CACHE_ARGUMENT: cache}, **options), expected)
    with torch.no_grad(), context_parallel(model):
        out = model(**shard({"input_ids": prompt}))
    alone = model(prompt)
    own, whole = (gather_cache(out[kimi_k3.CACHE_ARGUMENT]), alone[kimi_k3.CACHE_ARGUMENT])
    for ours, theirs in zip(own.layers, whole.layers, strict=True):
        for got, tensor in zip(ours.tensors(), theirs.tensors(), strict=True):
            torch.testing.assert_close(got, tensor, **close)


def refusals(rank, data_dir):
    """What one process cannot do is told by all of them, with its number; nobody waits for the others."""
    only_first = dist.new_group([0])
    if rank:
        with pytest.raises(ValueError, match="not in the group"):
            shard({"input_ids": ids()}, only_first)
    model = load(data_dir / "kimi_linear_flat")
    part = ids()[:, :70]
    padded, cached = torch.ones_like(part), kimi_k3.HybridCache(model.config)
    padded[0, 0] = 0
    cases = (
        ({"attention_mask": padded}, "process 1 .*padding"),
        ({"attention_mask": [[1] * 70]}, "process 1 .*no attribute"),
        ({"past_key_values": cached}, "process 1 .*gather_cache"),
        ({"cu_seq_lens_q": torch.tensor([0, 70])}, "process 1 .*position_ids"),
        ({"output_attentions": True}, "process 1 .*output_attentions"),
        ({"input_ids": part[:, :2]}, "process 1 .*has 2 tokens, at least 3"),
        ({"input_ids": part[0]}, "process 1 .*input_ids .B, t."),
        ({"input_ids": part[:1]}, r"rows of the batch: \[2, 1\]"),
        ({"position_ids": torch.arange(70)[None]}, r"use of position_ids: \[False, True\]"),
        ({"position_ids": torch.arange(60)[None]}, r"process 1 .*\(1, 60\), expected \(2, 70\)"),
    )
    with context_parallel(model):
        for change, message in cases:
            with pytest.raises(ValueError, match=message):
                model(**{"input_ids": part, **(change if rank else {})})
        model(input_ids=part, attention_mask=torch.ones_like(part))  # all goes on after a refusal
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(ValueError, match="packed documents over several processes need"):
            model(input_ids=part, position_ids=documents((30, 40)))
    model.config.num_attention_heads = 3
    with pytest.raises(ValueError, match="3 heads of MLA do not divide among 2 processes"), context_parallel(model):
        pass
    model.config.num_attention_heads = 4 + 4 * rank
    with pytest.raises(ValueError, match=r"disagree about the model .*4, \d+\), .* 8, \d+\)"), context_parallel(model):
        pass
    with pytest.raises(ValueError, match="Linear holds no KimiK3Model"), context_parallel(torch.nn.Linear(1, 1)):
        pass
    with pytest.raises(ValueError, match="no cache to make whole"):
        gather_cache(None)
    for batch, message in (
        ({"attention_mask": padded}, "cannot cut padding"),
        ({"token_type_ids": part}, "does not know how to cut token_type_ids"),
        ({"labels": part[:, :9]}, "labels has shape"),
        ({"cu_seq_lens_q": torch.tensor([0, 70])}, "does not describe one row of 70 tokens"),
    ):
        with pytest.raises(ValueError, match=f"process 1 .*{message}"):
            shard({"input_ids": part, **(batch if rank else {})})
    for other in (part[:1], part[:, :-1], part + 1):  # as a sampler that deals out batches would give them
        with pytest.raises(ValueError, match="disagree about the batch, which has to be whole on each of them"):
            shard({"input_ids": other if rank else part})


def death(rank, data_dir):
    """A process that dies in a forward ends the other one's with an error."""
    model = load(data_dir / "kimi_linear_flat")
    with context_parallel(model):
        if rank:
            model.model.layers[1].register_forward_pre_hook(lambda *arguments: os._exit(DIED))
        with pytest.raises(RuntimeError, match=r"(?i)connection|peer|closed"):
            model(**shard({"input_ids": ids()}))


def in_one_of_two(rank, data_dir):
    logits_and_gradients(data_dir)
    bytes_on_the_wire(data_dir)
    adapters(data_dir)
    balance(data_dir)
    generation(data_dir)
    refusals(rank, data_dir)
    death(rank, data_dir)
    os._exit(0)  # the group lost a member: there is nothing left to take down together


def in_one_of_four(rank, data_dir):
    """States and gradients that pass through whole parts, and parts at which they end."""
    model = load(data_dir / "k3_tiny_mxfp4")
    # A part has 38 tokens. The documents of the second row end with the second part and inside the third.
    assert_as_one(model, position_ids=documents((20, 131), (76, 10, 65)))
    dist.destroy_process_group()


def on_one_of_two_gpus(rank, data_dir):
    """The Triton kernels and NCCL."""
    torch.cuda.set_device(rank)
    torch.cuda.init()
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for more in ({}, {"position_ids": PACKED}, {"position_ids": UNEVEN}):
        assert_as_one(load(data_dir / "k3_tiny_mxfp4", torch.float32).train(), 1e-3, **more)
    generation(data_dir, torch.float32, {"atol": 1e-4, "rtol": 1e-4})
    dist.destroy_process_group()


def start(function, world, rank, data_dir, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    function(rank, data_dir)


def exit_codes(function, world, data_dir, out):
    meeting = out / function.__name__
    context = torch.multiprocessing.get_context("fork")  # what is imported is there already
    arguments = [(function, world, rank, data_dir, meeting) for rank in range(world)]
    processes = [context.Process(target=start, args=one) for one in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        process.kill()
    return [process.exitcode for process in processes]


@pytest.mark.portable
def test_parts_on_several_processes_are_one_process_with_whole_rows(data_dir, tmp_path):
    run_script(__file__, data_dir, tmp_path, check=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parts_on_two_gpus(data_dir):
    run_script(__file__, data_dir, gpus=2, check=True)


if __name__ == "__main__" and "RANK" in os.environ:
    on_one_of_two_gpus(int(os.environ["RANK"]), Path(sys.argv[1]))
elif __name__ == "__main__":
    with pytest.raises(RuntimeError, match="needs a process group: start with torchrun"):
        context_parallel(torch.nn.Linear(1, 1)).__enter__()
    with pytest.raises(RuntimeError, match="needs a process group: start with torchrun"):
        shard({"input_ids": torch.ones(1, 4, dtype=torch.long)})
    folders = [Path(argument) for argument in sys.argv[1:]]
    assert exit_codes(in_one_of_four, 4, *folders) == [0, 0, 0, 0]
    assert exit_codes(in_one_of_two, 2, *folders) == [0, DIED]
