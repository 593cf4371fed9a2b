"""The layer in plain PyTorch with the roundings of docs/numerics.md, whose bits uniep must have.

Rows travel as TorchLayer's do; products are torch._grouped_mm; everything else is fp32 operations
of PyTorch, one at a time, so that nothing is fused or contracted.
"""
import torch

ROWS_AT_ONCE = 8192  # so that fp32 copies stay small beside the tensors themselves


def spans(count):
    """Slices that cut `count` rows."""
    return [slice(begin, min(begin + ROWS_AT_ONCE, count))
            for begin in range(0, count, ROWS_AT_ONCE)]


def halves(h):
    """Gate and up, in fp32."""
    return h.float().chunk(2, dim=1)


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


def sum_over_k(exchange, rows, topk):
    """Ascending k, fp32, from +0, one rounding."""
    by_slot = exchange.combine(rows).index_select(0, exchange.sent_of_slot)
    slots = by_slot.view(-1, topk, rows.shape[1])
    out = rows.new_empty(slots.shape[0], rows.shape[1])
    for span in spans(slots.shape[0]):
        total = torch.zeros_like(out[span], dtype=torch.float32)
        for k in range(topk):
            total = total + slots[span, k].float()
        out[span] = total.bfloat16()
    return out


class PlainLayer:
    """forward() and then backward() return the tensors of their pass by name."""

    def __init__(self, inputs, exchange):
        self.inputs = inputs
        self.exchange = exchange

    def forward(self):
        t, e = self.inputs, self.exchange
        self.x_rows = e.dispatch(t.x, e.token_of_sent)
        self.row_probs = e.dispatch(t.probs.flatten(), e.slot_of_sent)[:, None]
        self.h = torch._grouped_mm(self.x_rows, t.w1.transpose(1, 2), offs=e.offsets)
        self.a = self.h.new_empty(self.h.shape[0], self.h.shape[1] // 2)
        for span in spans(self.h.shape[0]):
            gate, up = halves(self.h[span])
            silu = gate * sigmoid(gate)
            self.a[span] = (self.row_probs[span] * (silu * up)).bfloat16()
        y = torch._grouped_mm(self.a, t.w2.transpose(1, 2), offs=e.offsets)
        return {"h": self.h, "out": sum_over_k(e, y, t.probs.shape[1])}

    def backward(self):
        t, e = self.inputs, self.exchange
        dy_rows = e.dispatch(t.dy, e.token_of_sent)
        da = torch._grouped_mm(dy_rows, t.w2, offs=e.offsets)
        dh, row_dprobs = self.swiglu_backward(da)
        dx = torch._grouped_mm(dh, t.w1, offs=e.offsets)
        dprobs = e.combine(row_dprobs).index_select(0, e.sent_of_slot).view_as(t.probs)
        return {"dx": sum_over_k(e, dx, t.probs.shape[1]), "dprobs": dprobs,
                "dw1": torch._grouped_mm(dh.t(), self.x_rows, offs=e.offsets),
                "dw2": torch._grouped_mm(dy_rows.t(), self.a, offs=e.offsets)}

    def swiglu_backward(self, da):
        """dh, and the probabilities' gradients by row."""
        dh = torch.empty_like(self.h)
        dprobs = torch.empty_like(self.row_probs[:, 0])
        for span in spans(da.shape[0]):
            gate, up = halves(self.h[span])
            s = sigmoid(gate)
            silu = gate * s
            grad = da[span].float()
            weighted = self.row_probs[span] * grad
            dgate = (weighted * up) * (s * (1 + gate * (1 - s)))
            dh[span] = torch.cat([dgate, weighted * silu], 1).bfloat16()
            dprobs[span] = (grad * (silu * up)).sum(1)
        return dh, dprobs
