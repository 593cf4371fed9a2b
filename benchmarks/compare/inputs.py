"""The tensors of a comparison, made on the GPU."""
from dataclasses import dataclass

import torch

from compare import group


@dataclass
class Inputs:
    """One rank's tensors, of uniep's shapes (include/uniep/layer.h)."""
    ids: torch.Tensor
    probs: torch.Tensor
    x: torch.Tensor
    dy: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor


def normal(generator, *sizes, scale=1.0):
    tensor = torch.randn(*sizes, device=group.DEVICE, dtype=torch.bfloat16, generator=generator)
    return tensor.mul_(scale)


def seeded(seed):
    return torch.Generator(group.DEVICE).manual_seed(seed * group.size() + group.rank())


class Weights:
    """A rank's weights of a model, and where their gradients go."""

    def __init__(self, shape):
        generator = seeded(1)
        local, hidden, inter = shape.experts // group.size(), shape.hidden, shape.intermediate
        self.model = shape.model
        self.w1 = normal(generator, local, 2 * inter, hidden, scale=hidden**-0.5)
        self.w2 = normal(generator, local, hidden, inter, scale=inter**-0.5)
        self.dw1, self.dw2 = torch.empty_like(self.w1), torch.empty_like(self.w2)


def route(shape, generator):
    """A router's choice among random logits, skewed as src/workload/synthetic.h says: experts and
    their probabilities."""
    logits = torch.randn(shape.tokens, shape.experts, device=group.DEVICE, generator=generator)
    logits -= shape.skew * torch.log1p(torch.arange(shape.experts, device=group.DEVICE))
    probs, ids = torch.topk(torch.softmax(logits, -1), shape.topk, -1)
    return ids.int(), probs / probs.sum(-1, keepdim=True)


def make_inputs(shape, weights):
    generator = seeded(2)
    ids, probs = route(shape, generator)
    return Inputs(ids=ids, probs=probs, x=normal(generator, shape.tokens, shape.hidden),
                  dy=normal(generator, shape.tokens, shape.hidden), w1=weights.w1, w2=weights.w2)
