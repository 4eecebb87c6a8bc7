"""DDP, FSDP2 by itself and through accelerate, in two processes on the CPU; a sharded checkpoint back in one."""

import copy
import itertools
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import TrainerCallback

import kimi_k3
import tiny
from kimi_k3.parallel import fully_shard_by_dtype, sharding
from kimi_k3.training import (
    PerHeadMuon,
    QuantileBalancer,
    QuantileBalancerCallback,
    muon_groups,
)
from several import by_one
from waiting import run_script


def texts(rank):
    return torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(rank))


def loss_of(model, rank):
    return model(texts(rank), labels=texts(rank)).loss


def load(folder, dtype=torch.bfloat16, **options):
    return kimi_k3.KimiK3ForCausalLM.from_pretrained(folder, dtype=dtype, **options).train()


def gradients_are_those_of_one(model, alone, rank, bound=0.15):
    """The sharded model's, against the mean over the ranks that `alone` computes.

    The bound is for products and sums of bfloat16 in another order; a rank left out, or a sum for a mean, is 0.5 at
    least.
    """
    loss = loss_of(model, rank)
    loss.backward()

    def of_one():
        losses = [loss_of(alone, r) for r in range(2)]
        (sum(losses) / 2).backward()
        return [loss.detach() for loss in losses], [parameter.grad for parameter in alone.parameters()]

    losses, gradients = by_one(of_one)
    assert torch.equal(loss, losses[rank])
    for (name, shard), whole, expected in zip(model.named_parameters(), alone.parameters(), gradients, strict=True):
        assert shard.dtype == whole.dtype and (shard.grad is None) == (expected is None), name
        if shard.grad is not None:
            error = (shard.grad.full_tensor().float() - expected.float()).norm()
            assert error <= bound * expected.float().norm() + 1e-6, name
    return loss


def trains_as_one(rank, folder, **options):
    model = load(folder, **options)
    alone = copy.deepcopy(model)
    fully_shard_by_dtype(model)
    assert {torch.bfloat16, torch.float32} <= {parameter.dtype for parameter in model.parameters()}
    loss = gradients_are_those_of_one(model, alone, rank)
    # Muon orthogonalises whole matrices: the step of two processes is that of one on the mean of their gradients.
    for shard, parameter in zip(model.parameters(), alone.parameters(), strict=True):
        parameter.grad = None if shard.grad is None else shard.grad.full_tensor().clone()
    for one in (model, alone):
        PerHeadMuon(muon_groups(one), lr=1e-2).step()
    for (name, shard), expected in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        # To a rounding of the step (2e-3 an entry), which alone is added while it is multiplied: a weight of bfloat16
        # may be its neighbour then, 2^-7 of it away at most.
        torch.testing.assert_close(
            shard.full_tensor(), expected[1], rtol=2**-7, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert loss_of(model, rank) < loss


def float32_as_one(rank, folder):
    """To 1e-4, the text that it goes on with too, with a loss that reads a cut weight."""
    model = load(folder, torch.float32, dequantize=True)
    model.loss_chunk = 10
    alone = copy.deepcopy(model)
    fully_shard_by_dtype(model)
    gradients_are_those_of_one(model, alone, rank, 1e-4)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(texts(0))}
    with torch.no_grad():
        torch.testing.assert_close(model(texts(0)).logits, alone(texts(0)).logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(*(one.eval().generate(texts(0), **options) for one in (model, alone)))


def distributed_data_parallel(rank, folder):
    whole = torch.nn.parallel.DistributedDataParallel(load(folder))
    for _ in range(2):  # every parameter has its gradient, else the second step is refused
        loss_of(whole, rank).backward()


def adapters(rank, folder):
    """float32 factors beside bfloat16 weights and packed experts, all in one layer."""
    from peft import LoraConfig, get_peft_model

    from kimi_k3.training import lora_targets

    model = load(folder)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **lora_targets(model)))
    alone = copy.deepcopy(model)
    fully_shard_by_dtype(model)
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    assert trained == {torch.float32} and not any(p.requires_grad for n, p in model.named_parameters() if "A_log" in n)
    gradients_are_those_of_one(model, alone, rank)
    assert sum(p.grad is not None for p in model.parameters()) > 50


def float32_weights_compute_in_bfloat16(rank, folder):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard_by_dtype(load(folder, torch.float32), policy)
    loss = loss_of(model, rank)
    assert torch.equal(loss, loss_of(load(folder), rank)), "A_log and its like must not be rounded"
    loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def accelerate_on_a_cpu():
    """accelerate keeps FSDP for accelerators; told that these are, it runs the same code on CPUs."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def through_accelerate(rank, folder, out):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerate_on_a_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="no")
    assert accelerator.is_fsdp2
    model, alone = load(folder, dequantize=True), load(folder, dequantize=True)
    fully_shard_by_dtype(model)
    model, optimizer = accelerator.prepare(model, PerHeadMuon(muon_groups(model), lr=1e-2))
    balancer, balancer_alone = QuantileBalancer(model), QuantileBalancer(alone)
    for step in range(2):
        loss = loss_of(model, rank)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert torch.isfinite(norm.full_tensor())
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        if step == 0:
            for r in range(2):
                loss_of(alone, r)
            group, balancer_alone._counts = balancer_alone._counts, balancer_alone._counts.clone()
            if rank:  # both processes have counted everything: one of them is enough
                balancer_alone._counts.zero_()
            balancer_alone.step()
            assert group.any()
            for (name, bias), expected in zip(model.named_buffers(), alone.named_buffers(), strict=True):
                assert torch.equal(bias, expected[1]) and bias.any(), name
    for name, bias in model.named_buffers():
        both = [torch.empty_like(bias) for _ in range(2)]
        dist.all_gather(both, bias)
        assert torch.equal(*both), name
    weights, state = get_state_dict(model, optimizer.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=out / "sharded")
    whole = accelerator.get_state_dict(model)
    if rank == 0:
        model.save_pretrained(out / "folder", state_dict=whole)
    moments = {
        name: optimizer.optimizer.state[p]["momentum_buffer"].full_tensor()
        for name, p in model.named_parameters()
        if "momentum_buffer" in optimizer.optimizer.state.get(p, {})
    }
    losses = torch.stack([loss_of(model, r).detach() for r in range(2)])
    if rank == 0:
        torch.save({"losses": losses, "weights": whole, "moments": moments}, out / "expected.pt")


def sharded_trainer(model, out, steps, on_cpu=True, muon=False, parts=False):
    """Trains under FSDP2 and saves half way and at the end, where the model is again what it was when its loss was
    highest; a checkpoint in parts only saves (`docs/parallel.md`)."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        out,
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=5e-3,
        fsdp=True,
        fsdp_config={"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT" if parts else "FULL_STATE_DICT"},
        use_cpu=on_cpu,
        report_to="none",
        eval_strategy="steps",
        eval_steps=max(steps // 2, 1),
        save_steps=max(steps // 2, 1),
        load_best_model_at_end=not parts,
        metric_for_best_model="loss",
        greater_is_better=True,
        logging_steps=1,
        disable_tqdm=True,
    )
    device = arguments.device  # this makes the process group where there is none
    if on_cpu:
        accelerate_on_a_cpu()
    model = fully_shard_by_dtype(model.to(device))
    # Under FSDP a Trainer makes the optimizer itself: it takes a class and its arguments.
    optimizer = (PerHeadMuon, {"params": muon_groups(model), "lr": 5e-3}) if muon else None
    data = [{"input_ids": texts(0)[0], "labels": texts(0)[0]}] * 10
    made = Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data[:2],
        callbacks=[QuantileBalancerCallback()],
        optimizer_cls_and_kwargs=optimizer,
    )
    assert made.accelerator.is_fsdp2 and made.is_fsdp_enabled
    return made


def losses_of(trained, kind="loss"):
    logged = [line for line in trained.state.log_history if kind in line]
    assert kind != "loss" or all(line["router_max_load"] >= 1 for line in logged)
    return [line[kind] for line in logged]


def trainer(rank, folder, out, on_cpu=True):
    """Saved and put back to the best step: a whole model with Muon, and adapters on a packed one, which go on too."""
    from peft import LoraConfig, get_peft_model

    from kimi_k3.training import lora_targets

    trained = sharded_trainer(load(folder, dequantize=True), out / "whole", 4, on_cpu, muon=True)
    trained.train()
    best, last = losses_of(trained, "eval_loss")
    assert len(losses_of(trained)) == 4 and last < losses_of(trained)[0] - 1
    assert trained.evaluate()["eval_loss"] == best > last
    trained.save_model(out / "trained")
    dist.barrier()
    again, ids = load(out / "trained").to(trained.model.device), texts(0).to(trained.model.device)
    assert again(ids, labels=ids).loss.item() == pytest.approx(best, rel=1e-5)

    def adapted():
        torch.manual_seed(0)
        model = load(folder)
        return get_peft_model(model, LoraConfig(r=2, **lora_targets(model)))

    trained = sharded_trainer(adapted(), out / "adapted", 2, on_cpu)
    trained.train()
    best, last = losses_of(trained, "eval_loss")
    assert trained.evaluate()["eval_loss"] == best > last
    resumed = sharded_trainer(adapted(), out / "adapted", 2, on_cpu)
    resumed.train(resume_from_checkpoint=str(out / "adapted" / "checkpoint-1"))
    assert losses_of(resumed) == losses_of(trained) and losses_of(resumed, "eval_loss") == [best, last]

    in_parts = [sharded_trainer(load(folder, dequantize=True), out / "parts", 2, on_cpu, parts=True) for _ in range(2)]
    in_parts[0].train()
    in_parts[1].train(resume_from_checkpoint=str(out / "parts" / "checkpoint-1"))
    assert (out / "parts" / "checkpoint-1" / "pytorch_model_fsdp_0").is_dir()
    for kind in ("loss", "eval_loss"):
        first, second = (losses_of(each, kind) for each in in_parts)
        assert len(first) == 2 and first == second


def stop(*args, **kwargs):
    raise InterruptedError("the checkpoint is read, and no step was made")


def in_one_alone(_, out):
    """A checkpoint of two processes in one: weights, biases and the state of the optimizer."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", init_method=f"file://{out / 'alone'}", rank=0, world_size=1)
    checkpoint = out / "whole" / "checkpoint-2"
    alone = sharded_trainer(load(out / "small", dequantize=True), out / "whole", 4, muon=True)
    alone.add_callback(type("Stop", (TrainerCallback,), {"on_train_begin": stop}))
    with pytest.raises(InterruptedError):
        alone.train(resume_from_checkpoint=str(checkpoint))
    saved, optimizer = torch.load(checkpoint / "optimizer.bin")["state"], alone.optimizer.optimizer
    states = {name: optimizer.state[p] for name, p in alone.model.named_parameters() if p in optimizer.state}
    assert saved.keys() == states.keys() and len(states) > 50
    for name, state in states.items():
        for key, tensor in state.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert torch.equal(whole, saved[name][key].to(whole)), (name, key)
    # the same weights, but rows of one batch that lay on two processes: float32 sums in another order
    assert alone.evaluate()["eval_loss"] == pytest.approx(losses_of(alone, "eval_loss")[0], rel=1e-5)
    dist.destroy_process_group()


def in_one_of_two(rank, data_dir, out):
    torch.set_num_threads(1)
    # As torchrun sets them, for accelerate; the processes meet in a file.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    dist.init_process_group("gloo", init_method=f"file://{out / 'meeting'}", rank=rank, world_size=2)
    distributed_data_parallel(rank, data_dir / "k3_dense_flat")
    trains_as_one(rank, data_dir / "k3_dense_flat")
    trains_as_one(rank, data_dir / "k3_tiny_mxfp4", dequantize=True)
    trains_as_one(rank, data_dir / "k3_tiny_mxfp4")
    float32_as_one(rank, data_dir / "k3_tiny_mxfp4")
    adapters(rank, data_dir / "k3_tiny_mxfp4")
    float32_weights_compute_in_bfloat16(rank, data_dir / "k3_dense_flat")
    through_accelerate(rank, data_dir / "k3_tiny_mxfp4", out)
    trainer(rank, out / "small", out)
    dist.destroy_process_group()


@pytest.mark.portable
def test_two_processes_train_as_one_and_one_goes_on(data_dir, tmp_path):
    """Faults 100, 101: float32 A_log and dt_bias beside bfloat16; frozen packed experts and adapters too."""
    run_script(__file__, data_dir, tmp_path, check=True)
    expected = torch.load(tmp_path / "expected.pt")
    model = load(data_dir / "k3_tiny_mxfp4", dequantize=True)
    optimizer = PerHeadMuon(muon_groups(model), lr=1e-2)
    assert loss_of(model, 0) != expected["losses"][0]
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "sharded", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    folder = load(tmp_path / "folder")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected["weights"][name]), name
        assert torch.equal(parameter, folder.get_parameter(name)), name
    assert len(expected["moments"]) > 50
    for name, moment in expected["moments"].items():
        assert torch.equal(optimizer.state[model.get_parameter(name)]["momentum_buffer"], moment), name
    # Of equal weights, but this process may have more threads than those had, and sum in another order in bfloat16.
    for rank, loss in enumerate(expected["losses"]):
        for one in (model, folder):
            torch.testing.assert_close(loss_of(one, rank), loss, rtol=2**-7, atol=0)


@pytest.mark.one_release
def test_every_process_gets_a_part_if_it_can():
    """Rows as `torch.chunk` cuts them; columns where these leave out a process and divide; else there is a warning."""
    for rows, columns in itertools.product((1, 2, 5, 8, 96), (None, 12, 7)):
        parameter = torch.nn.Parameter(torch.zeros(rows, *filter(None, [columns])))
        for processes in (1, 2, 3, 4, 64):
            chosen = sharding._without_empty_parts(parameter, processes)
            by_rows = len(parameter.chunk(processes)) == processes
            by_columns = columns is not None and columns % processes == 0
            assert (chosen is not None) == (not by_rows and by_columns), (rows, columns, processes)
            assert chosen is None or chosen.dim == 1
            holder = torch.nn.ParameterDict({"weight": parameter})
            assert sharding._left_empty(holder, processes) == ([] if by_rows or by_columns else ["weight"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_trainer_on_two_gpus(data_dir, tmp_path):
    run_script(__file__, data_dir, tmp_path, gpus=2, check=True)


if __name__ == "__main__" and "RANK" in os.environ:
    trainer(int(os.environ["RANK"]), Path(sys.argv[1]) / "k3_tiny_mxfp4", Path(sys.argv[2]), on_cpu=False)
    dist.destroy_process_group()
elif __name__ == "__main__":
    processes = torch.multiprocessing.get_context("fork")  # what is imported is there already
    folders = [Path(argument) for argument in sys.argv[1:]]
    tiny.model("kmk", **{**tiny.PACKED, "vocab_size": 100}).save_pretrained(folders[1] / "small")
    started = [processes.Process(target=in_one_of_two, args=(rank, *folders)) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0]
    alone = processes.Process(target=in_one_alone, args=folders)
    alone.start()
    alone.join()
    assert alone.exitcode == 0
