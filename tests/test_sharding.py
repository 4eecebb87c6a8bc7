"""DDP, and FSDP2 of a model with two dtypes, in two processes on the CPU."""

import copy
import subprocess
import sys

import pytest
import torch

import kimi_k3
from kimi_k3.training import PerHeadMuon, fully_shard_by_dtype, muon_groups


def texts(rank):
    return torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(rank))


def step_in_one_of_two(rank, folder, meeting, options):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = kimi_k3.KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).train()
    alone = copy.deepcopy(model)
    whole = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    for _ in range(2):  # every parameter has its gradient, else the second step is refused
        whole(input_ids=texts(rank), labels=texts(rank)).loss.backward()
    fully_shard_by_dtype(model)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    assert {torch.bfloat16, torch.float32} <= dtypes
    loss = model(texts(rank), labels=texts(rank)).loss
    loss.backward()
    losses = [alone(texts(r), labels=texts(r)).loss for r in range(2)]
    assert torch.equal(loss, losses[rank])
    (sum(losses) / 2).backward()
    for (name, shard), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert shard.dtype == expected.dtype and (shard.grad is None) == (expected.grad is None), name
        if shard.grad is not None:
            error = (shard.grad.full_tensor().float() - expected.grad.float()).norm()
            assert error <= 0.05 * expected.grad.float().norm() + 1e-6, name  # sums of bfloat16 in another order
    # Muon orthogonalises whole matrices: the step of two processes is that of one on the mean of their gradients.
    for shard, parameter in zip(model.parameters(), alone.parameters(), strict=True):
        parameter.grad = None if shard.grad is None else shard.grad.full_tensor().clone()
    for one in (model, alone):
        PerHeadMuon(muon_groups(one), lr=1e-2).step()
    for (name, shard), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        # to a rounding of the step (2e-3 an entry): alone it is added while it is multiplied
        torch.testing.assert_close(
            shard.full_tensor(), expected, rtol=2**-7, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert model(texts(rank), labels=texts(rank)).loss < loss
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "case",
    [("k3_dense_flat",), ("k3_tiny_mxfp4", "dequantize"), ("k3_tiny_mxfp4",)],
    ids=["dense", "float experts", "packed experts"],
)
def test_two_processes_train_as_one(case, data_dir, tmp_path):
    """Faults 100, 101: float32 A_log and dt_bias beside bfloat16; frozen packed experts too."""
    rest = [str(data_dir / case[0]), str(tmp_path / "meeting"), *case[1:]]
    processes = [subprocess.Popen([sys.executable, "-P", __file__, str(rank), *rest]) for rank in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]


if __name__ == "__main__":
    rank, folder, meeting, *names = sys.argv[1:]
    step_in_one_of_two(int(rank), folder, meeting, dict.fromkeys(names, True))
