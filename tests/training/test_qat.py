"""Quantisation-aware training of the experts."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from kimi_k3.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from kimi_k3.training import finish_qat, qat, start_qat

pytestmark = pytest.mark.one_release

FOLDER = "k3_tiny_mxfp4"
IDS = torch.arange(3, 43).view(2, 20)


def load(data_dir, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(data_dir / FOLDER, dtype=torch.float32, dequantize=True, **options)
    for name, parameter in model.named_parameters():
        if ".experts." in name:  # off the MXFP4 grid
            parameter.data += 0.02 * torch.randn(parameter.shape)
    return model


def losses_and_grads(model):
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss, grads


def test_forward_and_gradients_are_those_of_the_rounded_weights(data_dir):
    model = load(data_dir)
    rounded = copy.deepcopy(model)
    for name, parameter in rounded.named_parameters():
        if ".experts." in name:
            parameter.data = dequantize_mxfp4(*quantize_mxfp4(parameter.data), torch.float32)
    plain = model(IDS).logits
    loss, grads = losses_and_grads(start_qat(model, activations=False))
    expected, expected_grads = losses_and_grads(rounded)
    assert torch.equal(loss, expected) and not torch.equal(model(IDS).logits, plain)
    assert grads.keys() == expected_grads.keys()
    assert all(torch.equal(grads[name], expected_grads[name]) for name in grads)


def test_training_lowers_the_loss_and_the_result_is_exact_in_mxfp4(data_dir):
    model = start_qat(load(data_dir))
    names = set(model.state_dict())
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if ".experts." in n], lr=3e-3)
    first = model(IDS, labels=IDS).loss.item()
    for _ in range(15):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = model(IDS, labels=IDS).loss.item()
    assert trained < first - 0.02
    start_qat(model, activations=False)
    expected = model(IDS).logits
    assert set(finish_qat(model).state_dict()) == names
    assert torch.equal(model(IDS).logits, expected)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            assert torch.equal(dequantize_mxfp4(*quantize_mxfp4(parameter.data), torch.float32), parameter.data)


def test_mxfp8_rounds_to_the_nearest_of_its_numbers():
    """Against all E4M3 numbers under the scale that the largest of a group asks for."""
    torch.manual_seed(0)
    x = torch.randn(3, 64, dtype=torch.float64) * torch.tensor([[1e-6], [1.0], [3e4]], dtype=torch.float64)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = numbers[numbers.isfinite()]
    groups = x.float().double().view(3, 2, 32)
    scale = 2.0 ** (groups.abs().amax(-1, keepdim=True).log2().floor() - 8)
    grid = numbers * scale[..., None]
    nearest = (groups[..., None] - grid).abs().amin(-1)
    got = qat.mxfp8(x.float()).double().view(3, 2, 32)
    torch.testing.assert_close((got - groups).abs(), nearest, rtol=1e-6, atol=0)
    assert qat.mxfp8(torch.zeros(1, 32)).eq(0).all()
    with pytest.raises(ValueError, match="multiple of 32"):
        qat.mxfp8(torch.zeros(1, 33))


def test_refuses_models_without_float_experts_and_other_implementations(data_dir):
    packed = AutoModelForCausalLM.from_pretrained(data_dir / FOLDER, dtype=torch.float32)
    with pytest.raises(ValueError, match="dequantize=True"):
        start_qat(packed)
    dense = AutoModelForCausalLM.from_pretrained(data_dir / "k3_dense_flat", dtype=torch.float32)
    with pytest.raises(ValueError, match="no floating-point experts"):
        start_qat(dense)
    with pytest.raises(ValueError, match="'eager'"):
        start_qat(load(data_dir, experts_implementation="batched_mm"))
