#!/usr/bin/env python3
"""Contract (e): the CUDA backend gives the bits of the same layer written in plain PyTorch.

    plain_torch.py UNIEP RANKS [LAYER.safetensors ...]

Runs `UNIEP run --backend cuda` on each layer (and on made-up ones whose sizes no tile divides, one of them
with every gated activation) under each of SCHEDULES, composes the layer from torch._grouped_mm and fp32 elementwise code with the roundings of
docs/numerics.md, and prints the elements that differ in any bit per tensor; dprobs, whose sum PyTorch
orders otherwise, is compared to tolerance. Exit code 1 on any difference. Needs a Hopper GPU, torch and safetensors.
"""
import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file

SCHEDULES = ["sequential", "single"]
DEVICE = "cuda"


def has_newer_erf():
    """Of which tests/python/test_cuda.py compares the bits."""
    return tuple(int(part) for part in torch.version.cuda.split(".")[:2]) >= (13, 2)


def made_up_layer(tokens, hidden, intermediate, experts, topk, seed):
    """Random numbers of order 1 everywhere; a few dropped slots, and an expert without rows."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g).bfloat16()
    logits = torch.randn(tokens, experts, generator=g)
    logits[:, experts // 2] = -1e9
    probs, ids = torch.topk(torch.softmax(logits, -1), topk, -1)
    ids[torch.rand(tokens, topk, generator=g) < 0.05] = -1
    return {
        "x": normal(tokens, hidden), "dy": normal(tokens, hidden),
        "w1": (normal(experts, 2 * intermediate, hidden).float() * hidden**-0.5).bfloat16(),
        "w2": (normal(experts, hidden, intermediate).float() * intermediate**-0.5).bfloat16(),
        "topk_ids": ids.int(), "topk_probs": (probs / probs.sum(-1, keepdim=True)).float(),
    }


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


def silu(z):
    s = sigmoid(z)
    return z * s, s * (1 + z * (1 - s))


def gelu(z):
    above = 1 + torch.erf(z * 0.70710678118654752440)
    density = torch.exp(-0.5 * z * z) * 0.39894228040143267794
    return z * 0.5 * above, 0.5 * above + z * density


def gelu_tanh(z):
    beta, kappa = 0.79788456080286535588, 0.044715
    square = z * z
    t = torch.tanh(beta * (z + kappa * (square * z)))
    half, above = 0.5 * z, 1 + t
    # 3 kappa as fp32 has it: 3 times the fp32 number.
    slope = beta * (1 + float(3 * torch.tensor(kappa)) * square)
    return half * above, 0.5 * above + half * (1 - t * t) * slope


def relu(z):
    return torch.where(z <= 0, 0, z), torch.where(z <= 0, 0.0, 1.0)


def limited(z, limit, alpha):
    g = torch.where(z > limit, limit, z)
    scaled = alpha * g
    s = sigmoid(scaled)
    return g * s, torch.where(z > limit, 0, s * (1 + scaled * (1 - s)))


def limited_up(z, limit, offset):
    u = z.clamp(-limit, limit)
    return u + offset if offset else u, torch.where(z.abs() > limit, 0.0, 1.0)


def softcap(z, cap):
    t = torch.tanh(z * float(torch.tensor(1 / cap)))
    return t * cap, 1 - t * t


def softcapped_gate(z):
    (value, slope), s = softcap(z, 4), sigmoid(z)
    return value * s, s * (slope + value * (1 - s))


# Value and derivative of the gate half, and of the up half.
ACTIVATIONS = {
    "swiglu": (silu, None), "geglu": (gelu, None), "geglu_tanh": (gelu_tanh, None),
    "reglu": (relu, None),
    "gpt_oss": (lambda z: limited(z, 7, 1.702), lambda z: limited_up(z, 7, 1)),
    "swiglu_clamped": (lambda z: limited(z, 10, 1), lambda z: limited_up(z, 10, 0)),
    "swiglu_softcapped": (softcapped_gate, lambda z: softcap(z, 25)),
}


def sum_over_k(rows, order, tokens, topk):
    """Ascending k, fp32, from +0, one rounding; dropped slots hold zeros."""
    slots = torch.zeros(tokens * topk, rows.shape[1], device=DEVICE, dtype=torch.bfloat16)
    slots[order] = rows
    total = torch.zeros(tokens, rows.shape[1], device=DEVICE)
    for k in range(topk):
        total = total + slots.view(tokens, topk, -1)[:, k].float()
    return total.bfloat16()


def plain_layer(t, activation="swiglu"):
    tokens, topk = t["topk_ids"].shape
    experts, inter = t["w1"].shape[0], t["w1"].shape[1] // 2
    flat = t["topk_ids"].flatten().long()
    dropped = int((flat < 0).sum())
    order = torch.argsort(flat, stable=True)[dropped:]  # canonical rows: expert, then (token, k)
    counts = torch.bincount(flat[order] if len(order) else flat[:0], minlength=experts)
    offs = torch.cumsum(counts, 0).int()
    token = order // topk
    p = t["topk_probs"].flatten()[order][:, None]
    xe, dye, w1, w2 = t["x"][token], t["dy"][token], t["w1"], t["w2"]

    h = torch._grouped_mm(xe, w1.transpose(1, 2), offs=offs)
    hg, hu = h[:, :inter].float(), h[:, inter:].float()
    of_gate, of_up = ACTIVATIONS[activation]
    value, slope = of_gate(hg)
    up, up_slope = (hu, 1.0) if of_up is None else of_up(hu)
    product = value * up
    a = (p * product).bfloat16()
    y = torch._grouped_mm(a, w2.transpose(1, 2), offs=offs)
    da = torch._grouped_mm(dye, w2, offs=offs).float()
    weighted = p * da
    dh = torch.cat([(weighted * up) * slope, (weighted * value) * up_slope], 1).bfloat16()
    dx = torch._grouped_mm(dh, w1, offs=offs)
    dprobs = torch.zeros(tokens * topk, device=DEVICE)
    dprobs[order] = (da * product).sum(1)
    return {
        "out": sum_over_k(y, order, tokens, topk), "dx": sum_over_k(dx, order, tokens, topk),
        "dprobs": dprobs.view(tokens, topk),
        "dw1": torch._grouped_mm(dh.t(), xe, offs=offs),
        "dw2": torch._grouped_mm(dye.t(), a, offs=offs),
    }


def check(uniep, ranks, layer_file, name, folder, activation="swiglu"):
    want = plain_layer(load_file(layer_file, device=DEVICE), activation)
    good = True
    for schedule in SCHEDULES:
        result = os.path.join(folder, "result.safetensors")
        subprocess.run([uniep, "run", "--backend", "cuda", "--ranks", str(ranks), "--input",
                        layer_file, "--schedule", schedule, "--activation", activation, "--output", result],
                       check=True, stdout=subprocess.DEVNULL)
        good &= compare(f"{name} {schedule}", load_file(result, device=DEVICE), want)
    return good


def compare(name, got, want):
    good = True
    for tensor, w in want.items():
        g = got[tensor]
        if tensor == "dprobs":
            distance = float((g - w).norm() / w.norm().clamp_min(1e-30))
            good &= distance < 1e-5
            print(f"{name:39s} {tensor:7s} {g.numel():10d}  rel. L2 {distance:.1e}")
            continue
        wrong = int((g.view(torch.int16) != w.view(torch.int16)).sum())
        good &= wrong == 0
        print(f"{name:39s} {tensor:7s} {g.numel():10d}  #wrong {wrong}")
    return good


def main():
    uniep, ranks, files = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            good &= check(uniep, ranks, file, os.path.basename(file), folder)
        for sizes in [(1000, 2880, 2880, 8, 4), (777, 520, 264, 16, 3), (2048, 4096, 1536, 16, 8),
                      (512, 7168, 2048, 8, 2)]:
            layer = os.path.join(folder, "layer.safetensors")
            save_file(made_up_layer(*sizes, seed=1), layer)
            good &= check(uniep, ranks, layer, "T,H,I,E,K=" + ",".join(map(str, sizes)), folder)
        layer = os.path.join(folder, "layer.safetensors")
        tensors = made_up_layer(777, 520, 264, 16, 3, seed=2)
        tensors["w1"] = tensors["w1"] * 4  # so that h passes limits
        save_file(tensors, layer)
        for activation in ACTIVATIONS:
            if activation == "geglu" and has_newer_erf():
                print("geglu: not compared: PyTorch has the erf of CUDA 13.2, UNIEP run that of CUDA 13.0")
                continue
            good &= check(uniep, ranks, layer, activation, folder, activation)
    print("PASSED: the same bits" if good else "FAILED: bits differ")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
