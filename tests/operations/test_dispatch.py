"""Which device and tensors the Triton kernels take, and that a refusal is told once."""

import contextlib
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from kimi_k3.kernels import dispatch, experts, kda, kda_step, mla_decode, norms, short_conv, situ
from rounding import error

pytestmark = pytest.mark.one_release

REALLY = dispatch._device_refusal


class OnGPU:
    """Stands for a tensor on a GPU, of which only type and device are looked at."""

    requires_grad = False

    def __init__(self, dtype=torch.bfloat16, index=0):
        self.dtype, self.device = dtype, torch.device("cuda", index)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(dispatch, "_device_refusal", lambda device: None)
    monkeypatch.setattr(dispatch, "_broken", {})
    dispatch._tell.cache_clear()


def test_cpu_tensors_take_the_torch_path_without_a_word(caplog):
    """Fault 78: Triton or torch is chosen by device, and the choice is told where it could surprise."""
    assert "cpu" in dispatch.triton_refusal(torch.zeros(1))
    assert not caplog.records


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU that Triton knows")
def test_a_device_that_triton_does_not_know():
    """Fault 81: any device type gets the torch path, with the reason."""
    REALLY.cache_clear()
    assert REALLY(torch.device("mps")) == "Triton has no backend for mps"


@pytest.mark.parametrize(("capability", "reason"), [((7, 5), "older than compute capability 8.0"), ((8, 0), None)])
def test_an_old_gpu_is_refused(capability, reason, monkeypatch):
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(dispatch, "capability", lambda device: capability)
    REALLY.cache_clear()
    found = REALLY(torch.device("cuda", 3))
    REALLY.cache_clear()
    assert found is None if reason is None else reason in found


def test_operands_keep_the_precision_of_float32():
    import triton.language as tl

    from kimi_k3.kernels.triton_tools import operand_types

    assert operand_types(torch.float32) == (tl.float32, tl.float32)
    assert operand_types(torch.float16) == operand_types(torch.bfloat16) == (tl.bfloat16, tl.float16)


def test_everything_supported_is_taken():
    assert dispatch.triton_refusal(OnGPU(), OnGPU(torch.float32), sizes=(16, 256)) is None


@pytest.mark.parametrize(
    ("tensors", "sizes", "reason"),
    [
        ((OnGPU(torch.float64),), (), "float64"),
        ((OnGPU(), OnGPU(index=1)), (), "several devices"),
        ((OnGPU(),), (64, 512), "512 is above 256"),
    ],
)
def test_a_refusal_names_its_reason_and_is_logged_once(tensors, sizes, reason, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert reason in dispatch.triton_refusal(*tensors, sizes=sizes)
    assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_the_kernels_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(dispatch, "use_triton", False)
    assert "use_triton" in dispatch.triton_refusal(OnGPU())


def triton_error():
    """An exception as Triton's compiler raises it."""
    return type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})("no such operation")


@pytest.mark.parametrize("error", [triton_error(), RuntimeError("PassManager::run failed")], ids=["class", "message"])
def test_kernels_that_do_not_compile_leave_the_torch_path(error, monkeypatch, caplog):
    """Fault 82: forward and backward of every operation fall back, with the reason once and no second attempt."""
    pytest.importorskip("triton")
    from kimi_k3.kernels import (
        kda_backward_triton,
        kda_chunk_triton,
        kda_step_triton,
        norms_triton,
        short_conv_triton,
        situ_triton,
    )

    attempts = []

    def broken(module):
        def kernel(*arguments):
            attempts.append(1)
            raise error

        kernel.__module__ = module.__name__
        return kernel

    for module, name in (
        (kda_chunk_triton, "forward"),
        (kda_backward_triton, "backward"),
        (kda_step_triton, "step"),
        (short_conv_triton, "forward"),
        (short_conv_triton, "backward"),
        (norms_triton, "forward"),
        (situ_triton, "forward"),
    ):
        monkeypatch.setattr(module, name, broken(module))
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 5, 2, 16, requires_grad=True) for _ in range(4))
    beta, parameters = torch.randn(1, 5, 2), kda.KDAParameters(torch.randn(2), torch.randn(32), -5.0)
    weight = torch.randn(32, 1, 4, requires_grad=True)

    def operations():
        y, _ = short_conv.short_conv(v.flatten(2), weight)
        out, state = kda.fused_kda(q, k, y.view_as(v), g, beta, parameters)
        out = norms.gated_rms_norm(situ.situ_glu(out, v, 4.0, 25.0), v, torch.ones(16), 1e-5)
        grads = torch.autograd.grad(out.sum() + state.sum(), (q, k, v, g, weight))
        with torch.no_grad():
            tails = tuple(torch.ones(1, 3, 32) for _ in range(3))
            flat = (x.flatten(2) for x in (q, k, v, g))
            step = kda_step.kda_step(*flat, beta, v.flatten(2), tails, (weight,) * 3, parameters,
                                     torch.ones(16), state, 1e-5)  # fmt: skip
        return [out, state, *grads, step[0], step[2]]

    expected = operations()
    assert not attempts
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)
    with caplog.at_level(logging.WARNING):
        got = operations()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    # each operation is tried once, told once, and the others go on
    assert len(attempts) == 5
    assert dispatch._broken.keys() == {"short_conv", "kda", "kda_step", "norms", "situ"}
    assert ["does not compile" in record.getMessage() for record in caplog.records] == [True] * 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the forward kernels on CPU tensors, in the interpreter")
def test_a_backward_kernel_alone_that_does_not_compile(monkeypatch):
    """Fault 82: the forward ran in Triton, the backward pass is composed in torch."""
    pytest.importorskip("triton")
    from kimi_k3.kernels import kda_backward_triton, norms_triton, short_conv_triton, situ_triton

    def broken(*arguments):
        raise triton_error()

    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 5, 2, 16, requires_grad=True) for _ in range(4))
    weight, state = torch.randn(32, 1, 4, requires_grad=True), torch.randn(1, 2, 16, 16, requires_grad=True)
    beta, A_log = torch.randn(1, 5, 2, requires_grad=True), torch.randn(2, requires_grad=True)
    parameters = kda.KDAParameters(A_log, torch.randn(32), -5.0)
    scale = torch.randn(16, requires_grad=True)

    def gradients():
        y, _ = short_conv.short_conv(v.flatten(2), weight)
        out, final = kda.fused_kda(q, k, y.view_as(v), g, beta, parameters, state)
        out = norms.rms_norm(situ.swiglu(norms.gated_rms_norm(out, v, scale, 1e-5), v), scale, 1e-5)
        leaves = q, k, v, g, beta, A_log, weight, state, scale
        return torch.autograd.grad(out.square().sum() + final.sum(), leaves)

    expected = gradients()
    monkeypatch.setattr(kda_backward_triton, "backward", broken)
    monkeypatch.setattr(short_conv_triton, "backward", broken)
    monkeypatch.setattr(norms_triton, "backward", broken)
    monkeypatch.setattr(situ_triton, "backward", broken)
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)
    for a, b in zip(gradients(), expected, strict=True):
        assert error(a, b) < 1e-5  # 160 units of float32


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch):
    """Triton launches on the current device, whatever device the pointers belong to."""
    entered = []

    @contextlib.contextmanager
    def device(index):
        entered.append(index)
        yield

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(current_device=lambda: 0, device=device))
    monkeypatch.setattr(dispatch, "_device_of", lambda arguments: arguments[0])

    def launch(where):
        return list(entered)

    assert dispatch.run_kernels(launch, torch.device("cuda", 0)) == []
    assert dispatch.run_kernels(launch, torch.device("cuda", 1)) == [torch.device("cuda", 1)]
    monkeypatch.undo()
    assert dispatch._device_of(([torch.zeros(1, device="meta")], 2)) == torch.device("meta")


def test_an_error_that_is_not_of_the_compiler_is_raised():
    def out_of_memory():
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        dispatch.run_kernels(out_of_memory)
    assert not dispatch._broken


@pytest.mark.parametrize(
    ("module", "instead"),
    [
        ("experts_few_gluon", "portable kernels, slower ones, instead of"),
        ("experts_triton", "the torch path instead of"),
    ],
)
def test_a_warning_says_what_runs_in_place_of_a_kernel(module, instead, caplog):
    """Behind a Gluon kernel comes a portable one."""

    class CompilationError(Exception):
        __module__ = "triton.compiler.errors"

    def run():
        raise CompilationError

    run.__module__ = f"kimi_k3.kernels.{module}"
    assert dispatch.run_kernels(run) is None
    assert f"kimi_k3 runs {instead}" in caplog.text and f"a kernel of {module.removesuffix('_triton')} " in caplog.text


@pytest.mark.parametrize("operation", [mla_decode, experts])
@pytest.mark.parametrize("release", ["without Gluon", "3.5.1", "with other names"])
def test_another_triton_has_the_portable_kernels_alone(operation, release, monkeypatch, caplog):
    """Found out once, and said: a step of every layer must not import in vain, nor a compilation fail."""
    triton = pytest.importorskip("triton")
    for name in ("mla_decode_gluon", "experts_few_gluon", "experts_gluon", "gluon_tools"):
        monkeypatch.delitem(sys.modules, f"kimi_k3.kernels.{name}", raising=False)
        monkeypatch.delattr(f"kimi_k3.kernels.{name}", raising=False)
    if release == "without Gluon":
        monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    elif release == "with other names":
        hopper = pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
        monkeypatch.delattr(hopper, "warpgroup_mma")
    else:
        monkeypatch.setattr(triton, "__version__", release)
    operation._gluon.cache_clear()
    assert not any(operation._gluon() for _ in range(3))
    assert operation._gluon.cache_info().misses == 1 and caplog.text.count("portable kernels") == 1
    operation._gluon.cache_clear()
