"""Megatron-Core on a CPU: stand-ins for what it asks of CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what Megatron makes on "cuda", and calls that type by its name there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):  # its optimizers ask for these
            found = found.replace("torch.", "torch.cuda.")
        return found


class _Adam(torch.optim.Optimizer):
    """As Transformer Engine's: its groups know the step."""

    def __init__(self, params: Any, lr: float, weight_decay: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = count = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update({name: torch.zeros_like(param) for name in _STATES})
                first, second = (state[name] for name in _STATES)
                first.lerp_(param.grad, 0.1)
                second.mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
                root = (second / (1 - 0.999**count)).sqrt_().add_(1e-8)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.addcdiv_(first, root, value=-group["lr"] / (1 - 0.9**count))


_STATES = ("exp_avg", "exp_avg_sq")


@contextlib.contextmanager
def adam_of_transformer_engine() -> Iterator[None]:
    """Lets Megatron find a stand-in for it, as its distributed optimizer's checkpoints ask."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer as distributed

    with (
        mock.patch.multiple(optimizer, Adam=_Adam, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.multiple(distributed, Adam=_Adam, HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True),
    ):
        yield


def patch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.current_stream = lambda *_: _Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.synchronize = lambda *_: None
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import moe_utils

    random.CudaRNGStatesTracker.fork = lambda self, *_: contextlib.nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(1, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *_, **__: None
    # What megatron-core 0.16 lacks without TransformerEngine; later ones have the same.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # SequentialMLP adds biases in place to what this returns, and on one rank that is a view.
    reduce = layers.reduce_from_tensor_model_parallel_region
    layers.reduce_from_tensor_model_parallel_region = lambda *args, **options: reduce(
        *args, **options
    ).clone()
    for linear in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        if not hasattr(linear, "backward_dw"):  # their weight gradients do not wait
            linear.backward_dw = lambda self: None
