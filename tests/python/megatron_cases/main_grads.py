"""Main gradients, and optimizers on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_cases.on_cpu import OnCpu
from megatron_cases.support import (
    GRADIENT,
    expect_close,
    expect_raises,
    expect_same,
    make_pair,
    make_tokens,
    of_experts,
    run_layer,
    train,
    wrapped,
)


def _with(ours: Any, fused: bool, delay: bool) -> Any:
    """The layer, after it was built: Megatron's linear layers want an extension for it."""
    ours.config.gradient_accumulation_fusion = fused
    ours.config.delay_wgrad_compute = delay
    for param in ours.experts.parameters():
        param.skip_backward_post_hook = delay
    return ours


def case_main_grads() -> None:
    """DDP with every mixture of options has the main gradients of Megatron's layer."""
    choices = (False, True)
    for layout in ("stacked", "per_expert"):
        plain: dict[bool, list[Tensor]] = {}
        for fused, fp32, distributed, delay in (
            (a, b, c, d) for a in choices for b in choices for c in choices for d in choices
        ):
            what = f"{layout} {fused=} {fp32=} {distributed=} {delay=}"
            theirs, ours = make_pair(layout=layout)
            ours = _with(ours, fused, delay)
            reference = wrapped(theirs, fp32=fp32, distributed=distributed)
            train(reference)
            model = wrapped(ours, fp32=fp32, distributed=distributed, delay=delay)
            train(model, delay=delay)
            wanted, found = of_experts(theirs, "main_grad"), of_experts(ours, "main_grad")
            for own, other in zip(found, wanted, strict=True):
                assert own.dtype == (torch.float32 if fp32 else torch.bfloat16)
                expect_close(own, other, GRADIENT, f"main_grad, {fused=} {fp32=}")
            for param in ours.experts.parameters():
                assert param.grad is None, f"{what}: the hook did not run"
                assert param.grad_added_to_main_grad == fused, what
            if fused:  # neither DDP's memory nor delay changes a bit
                expect_same(found, plain.setdefault(fp32, found), what)


def case_frozen_experts() -> None:
    """Main gradients of weights beside frozen ones are as without fusion and delay."""
    for layout, frozen in (
        ("stacked", "linear_fc1"),
        ("stacked", "linear_fc2"),
        ("per_expert", "weight0"),
        ("per_expert", "weight3"),
    ):
        plain: list[Tensor] | None = None
        for fused, delay in itertools.product((False, True), repeat=2):
            _, ours = make_pair(layout=layout)
            for name, param in ours.named_parameters():
                param.requires_grad_(frozen not in name)
            _with(ours, fused, delay)
            train(wrapped(ours, fp32=True, distributed=False, delay=delay), delay=delay)
            found = [p.main_grad for p in ours.experts.parameters() if p.requires_grad]
            assert all(gradient.any() for gradient in found)
            plain = found if plain is None else plain
            expect_same(found, plain, f"{layout}, {frozen} frozen, {fused=} {delay=}")


def case_experts_frozen_later() -> None:
    """Parameters may be frozen, and trained again, where DDP and the delay are there already."""
    for layout, frozen in (("stacked", "linear_fc1"), ("per_expert", "linear_fc2.weight3")):
        wanted: list[Tensor] | None = None
        for fused, delay in itertools.product((False, True), repeat=2):
            _, ours = make_pair(layout=layout)
            _with(ours, fused, delay)
            model = wrapped(ours, fp32=True, distributed=False, delay=delay, overlap=False)
            found = []
            for asks in (True, False, True):
                for name, param in ours.named_parameters():
                    param.requires_grad_(asks or frozen not in name)
                train(model, delay=delay)
                for name, param in ours.experts.named_parameters():
                    assert param.main_grad.any() == (asks or frozen not in name)
                    found.append(param.main_grad.clone())
            wanted = found if wanted is None else wanted
            for own, other in zip(found, wanted, strict=True):
                expect_close(own + 1, other + 1, 5e-3, f"{layout}, frozen later, {fused=} {delay=}")


def case_ddp_that_does_not_delay() -> None:
    """Gradients that would come after DDP has added up are refused; those in main_grad come."""

    def build(fused: bool, delay: bool, overlap: bool, frozen: str = "nothing") -> Any:
        _, ours = make_pair()
        for name, param in ours.named_parameters():
            param.requires_grad_(frozen not in name)
        _with(ours, fused, delay)
        return wrapped(ours, fp32=True, distributed=False, overlap=overlap)

    sentence = "give it DistributedDataParallelConfig(delay_wgrad_compute=True)"
    for overlap in (False, True):
        model = build(False, True, overlap)
        expect_raises(RuntimeError, sentence, train, model, delay=True)
        with torch.no_grad():
            model(make_tokens())
    # Gradients that are in main_grad in time, and those that autograd gives beside frozen ones.
    for fused, frozen in ((True, "nothing"), (False, "linear_fc1"), (True, "linear_fc1")):
        found = []
        for delay in (False, True):
            model = build(fused, delay, False, frozen)
            train(model, delay=delay)
            found.append([p.main_grad for p in model.parameters() if p.requires_grad])
        expect_same(*found, f"{fused=}, {frozen} frozen")


def case_biases_and_the_distributed_optimizer() -> None:
    """Per-expert biases lie apart in its buffers unless they fill what these align to."""
    for fused, what in ((False, "parameters"), (True, "main gradients")):
        _, apart = make_pair(layout="per_expert", add_bias_linear=True)
        model = wrapped(_with(apart, fused, False), fp32=True, distributed=True)
        said = expect_raises(RuntimeError, f"the {what} of linear_fc1.bias lie apart", train, model)
        assert "biases of a multiple of 64 numbers (these have 96)" in said, said
        found = []
        for layout in ("stacked", "per_expert"):
            options = {"add_bias_linear": True, "moe_ffn_hidden_size": 64}
            _, ours = make_pair(layout=layout, **options)
            train(wrapped(_with(ours, fused, False), fp32=True, distributed=True))
            found.append(of_experts(ours, "main_grad"))
        expect_same(*found, f"biases in buffers, {fused=}")


def case_experts_alone() -> None:
    """Experts get gradients where neither the layer's input nor its router needs one."""
    wanted: list[Tensor] | None = None
    for fused, delay in itertools.product((False, True), repeat=2):
        _, ours = make_pair()
        for param in ours.router.parameters():
            param.requires_grad_(False)
        for param in ours.experts.parameters() if fused else ():
            param.main_grad = torch.zeros(param.shape)
        _with(ours, fused, delay)
        out, _ = ours(make_tokens().detach())
        later = torch.zeros((), requires_grad=True)  # as of layers that follow
        (out.float().square().sum() + later).backward()
        if delay:
            ours.experts.backward_dw()
        found = of_experts(ours, "main_grad" if fused else "grad")
        wanted = found if wanted is None else wanted
        for own, other in zip(found, wanted, strict=True):
            expect_close(own.float(), other.float(), 5e-3, f"experts alone, {fused=} {delay=}")


def case_main_grad_without_ddp() -> None:
    """A main_grad without DDP is added to; param.grad reads as zeros and takes no memory."""
    for dtype in (torch.float32, torch.bfloat16):
        _, ours = make_pair()
        ours.config.gradient_accumulation_fusion = True
        for param in ours.experts.parameters():
            param.main_grad = torch.ones(param.shape, dtype=dtype)
        for step in range(2):
            run_layer(ours, make_tokens(step))
        once, twice = [], []
        for step in range(2):
            _, alone = make_pair()
            run_layer(alone, make_tokens(step))
            once.append(of_experts(alone, "grad"))
        twice = [1 + a.float() + b.float() for a, b in zip(*once, strict=True)]
        for found, wanted in zip(of_experts(ours, "main_grad"), twice, strict=True):
            expect_close(found, wanted, 5e-3, f"{dtype} main_grad added to ones")
        for param in ours.experts.parameters():
            assert param.grad is not None and not param.grad.any()
            assert param.grad.untyped_storage().nbytes() <= 2


def case_main_grad_errors() -> None:
    def refused(change: Callable[[Any], None], sentence: str) -> None:
        _, ours = make_pair()
        ours.config.gradient_accumulation_fusion = True
        for param in ours.experts.parameters():
            param.main_grad = torch.zeros(param.shape)
        change(ours.experts.linear_fc1.weight)
        expect_raises(RuntimeError, sentence, run_layer, ours, make_tokens())

    refused(lambda p: delattr(p, "main_grad"), "linear_fc1.weight has no main_grad")
    refused(lambda p: setattr(p, "zero_out_wgrad", True), "zero_out_wgrad=True")
    refused(lambda p: setattr(p, "main_grad", p.main_grad.half()), "is torch.float16")
    refused(lambda p: setattr(p, "main_grad", p.main_grad.transpose(1, 2)), "must be contiguous")
    refused(
        lambda p: p.register_post_accumulate_grad_hook(lambda _: None) and None,
        "post-accumulate-grad hook",
    )


def case_per_expert_anywhere() -> None:
    """Main gradients one behind another, backwards as in Megatron's DDP, and apart."""
    results = []
    for place in ("ascending", "descending", "apart"):
        _, ours = make_pair(layout="per_expert")
        ours.config.gradient_accumulation_fusion = True
        for linear in (ours.experts.linear_fc1, ours.experts.linear_fc2):
            params = list(linear.named().values())
            whole = torch.zeros(len(params), *params[0].shape)
            ordered = params[::-1] if place == "descending" else params
            for param, grad in zip(ordered, whole, strict=True):
                param.main_grad = grad.clone() if place == "apart" else grad
        results.append([*run_layer(ours, make_tokens()), *of_experts(ours, "main_grad")])
    for result in results[1:]:
        expect_same(results[0], result, "where main gradients lie")


def case_moved_parameters() -> None:
    """Parameters may be moved, as .cuda() does it."""
    _, ours = make_pair(layout="per_expert")
    wanted = run_layer(ours, make_tokens())
    for param in ours.experts.parameters():
        param.data = param.data.clone()
        param.grad = None
    expect_same(run_layer(ours, make_tokens()), wanted, "moved parameters")
    with torch.no_grad():
        ours.experts.linear_fc2.weight0.zero_()
    assert not torch.equal(run_layer(ours, make_tokens())[0], wanted[0]), (
        "a parameter is not in use"
    )


def case_optimizer_steps() -> None:
    """Megatron's mixed-precision Adam over uniep's parameters, and its checkpoint."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0
    )
    with OnCpu():
        norms = []
        for layout in ("megatron", "stacked", "per_expert"):
            theirs, ours = make_pair(layout="stacked" if layout == "megatron" else layout)
            layer = theirs if layout == "megatron" else ours
            layer.config.gradient_accumulation_fusion = layout != "megatron"
            model = wrapped(layer, fp32=True, distributed=False)
            optimizer = get_megatron_optimizer(options, [model])
            for _ in range(2):
                train(model)
                succeeded, norm, _ = optimizer.step()
                assert succeeded
            norms.append(torch.tensor(norm))
        expect_close(norms[1], norms[0], 1e-2, "norm of all gradients")
        expect_close(norms[2], norms[1], 1e-6, "norm with per_expert")
