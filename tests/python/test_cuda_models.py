"""On a GPU: models of transformers whose shared experts are part of uniep's pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_cases import distance, router_choices, small, step, tokens
from torch import Tensor

import uniep
import uniep.plain
import uniep.transformers

pytestmark = pytest.mark.cuda


def plain_moe(*args: Tensor, **options: Any) -> Tensor:
    kept = ("activation", "probs", "b1", "b2", "group")
    own = {n: options[n] for n in options if n in kept or n.startswith("shared_")}
    return uniep.plain.moe(*args, **own)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", {"n_shared_experts": 2}),
        ("qwen2_moe", {}),
        ("glm4_moe", {}),
        ("nemotron_h", {}),
    ],
    ids=str,
)
def test_shared_experts_in_the_pass(
    kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of plain PyTorch to the bit; near those of the model's own modules."""
    ids = tokens().cuda()
    own: Any = small(kind, **changes).cuda()
    choices: list[Tensor] = []
    with router_choices(record=choices):
        wanted = step(own, ids, "eager")
    model: Any = small(kind, **changes).cuda()
    uniep.transformers.use(model, shared_experts="fused")
    with router_choices(replay=list(choices)):
        found = step(model, ids)
    with monkeypatch.context() as patched, router_choices(replay=list(choices)):
        patched.setattr(uniep, "moe", plain_moe)
        plain = step(model, ids)
    assert torch.equal(found[0], plain[0])
    assert distance(found[0], wanted[0]) < 2e-2
    assert found[1].keys() == wanted[1].keys()
    far = {n: d for n, g in found[1].items() if not (d := distance(g, wanted[1][n])) < 0.1}
    assert far == {}
