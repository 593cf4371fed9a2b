"""What uniep is compared with: an MoE layer of PyTorch, NCCL and Triton, one stage after another.

Forward: stable permute, all-to-all, sort by expert, grouped GEMM, weighted SwiGLU in one kernel,
grouped GEMM, unsort, all-to-all, sum over k in a fixed order. Backward: the same back, with all
gradients. Split sizes are known beforehand, so that it never waits for the host.
"""
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from compare import group

BLOCK = 1024


@triton.jit
def swiglu_kernel(h, probs, a, inter, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inter
    gate = tl.load(h + row * 2 * inter + column, inside).to(tl.float32)
    up = tl.load(h + row * 2 * inter + inter + column, inside).to(tl.float32)
    weighted = tl.load(probs + row) * (gate * tl.sigmoid(gate) * up)
    tl.store(a + row * inter + column, weighted.to(tl.bfloat16), inside)


@triton.jit
def swiglu_backward_kernel(h, probs, da, dh, dprobs, a, inter, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    prob = tl.load(probs + row)
    partial = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, inter, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < inter
        gate = tl.load(h + row * 2 * inter + column, inside, other=0.0).to(tl.float32)
        up = tl.load(h + row * 2 * inter + inter + column, inside, other=0.0).to(tl.float32)
        grad = tl.load(da + row * inter + column, inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        partial += grad * (silu * up)
        dgate = prob * grad * up * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(dh + row * 2 * inter + column, dgate.to(tl.bfloat16), inside)
        dup = prob * grad * silu
        tl.store(dh + row * 2 * inter + inter + column, dup.to(tl.bfloat16), inside)
        tl.store(a + row * inter + column, (prob * (silu * up)).to(tl.bfloat16), inside)
    tl.store(dprobs + row, tl.sum(partial))


@triton.jit
def sum_over_k_kernel(rows, row_of_slot, out, hidden, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(TOPK):
        row = tl.load(row_of_slot + token * TOPK + k)
        total += tl.load(rows + row * hidden + column, inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(tl.bfloat16), inside)


def inverse(permutation):
    result = torch.empty_like(permutation)
    result[permutation] = torch.arange(len(permutation), device=permutation.device)
    return result


class Exchange:
    """Where rows go, and how they get there. No slot is dropped.

    A rank sends its rows by (expert, token, k); they arrive by (source, expert, token, k); an
    expert's segment has them by (source, token, k), which is uniep's canonical order.
    """

    def __init__(self, ids, experts):
        ranks, local = group.size(), experts // group.size()
        slots = ids.flatten().long()
        self.slot_of_sent = torch.argsort(slots, stable=True)
        self.token_of_sent = self.slot_of_sent // ids.shape[1]
        self.sent_of_slot = inverse(self.slot_of_sent)
        sent = torch.bincount(slots, minlength=experts).view(ranks, local)
        received = group.all_gather(sent)[:, group.rank()]  # [source, local expert]
        self.sent_rows = sent.sum(1).tolist()
        self.received_rows = received.sum(1).tolist()
        self.rows = sum(self.received_rows)
        expert = torch.arange(local, device=ids.device).repeat(ranks)
        by_arrival = expert.repeat_interleave(received.flatten())
        self.by_expert = torch.argsort(by_arrival, stable=True)
        self.by_arrival = inverse(self.by_expert)
        self.offsets = torch.cumsum(received.sum(0), 0).int()

    def dispatch(self, rows, index):
        """Row `index[i]` is what this rank sends as its row i; returns the experts' segments."""
        received = torch.empty(self.rows, *rows.shape[1:], device=rows.device, dtype=rows.dtype)
        dist.all_to_all_single(received, rows.index_select(0, index), self.received_rows,
                               self.sent_rows)
        return received.index_select(0, self.by_expert)

    def combine(self, rows):
        """The way back: what experts made of the rows this rank sent, as it sent them."""
        returned = torch.empty(sum(self.sent_rows), *rows.shape[1:], device=rows.device,
                               dtype=rows.dtype)
        dist.all_to_all_single(returned, rows.index_select(0, self.by_arrival), self.sent_rows,
                               self.received_rows)
        return returned


class TorchLayer:
    """Keeps what its passes compute, as a training step would until the next one; but not the
    gradients of weights, which a large layer has no room for beside those that uniep writes."""

    def __init__(self, inputs, exchange):
        self.inputs = inputs
        self.exchange = exchange

    def forward(self):
        t, e = self.inputs, self.exchange
        self.x_rows = e.dispatch(t.x, e.token_of_sent)
        self.row_probs = e.dispatch(t.probs.flatten(), e.slot_of_sent)
        self.h = torch._grouped_mm(self.x_rows, t.w1.transpose(1, 2), offs=e.offsets)
        self.a = self.swiglu()
        y = torch._grouped_mm(self.a, t.w2.transpose(1, 2), offs=e.offsets)
        self.out = self.sum_over_k(e.combine(y))

    def backward(self):
        t, e = self.inputs, self.exchange
        self.dy_rows = e.dispatch(t.dy, e.token_of_sent)
        da = torch._grouped_mm(self.dy_rows, t.w2, offs=e.offsets)
        row_dprobs = self.swiglu_backward(da)
        torch._grouped_mm(self.dy_rows.t(), self.a, offs=e.offsets)  # dw2
        dx = torch._grouped_mm(self.dh, t.w1, offs=e.offsets)
        torch._grouped_mm(self.dh.t(), self.x_rows, offs=e.offsets)  # dw1
        self.dx = self.sum_over_k(e.combine(dx))
        self.dprobs = e.combine(row_dprobs).index_select(0, e.sent_of_slot).view_as(t.probs)

    def products(self):
        """The operands of all products, by the names that uniep has for them."""
        t = self.inputs
        return {"fc1": (self.x_rows, t.w1.transpose(1, 2)), "fc2": (self.a, t.w2.transpose(1, 2)),
                "dfc2": (self.dy_rows, t.w2), "dfc1": (self.dh, t.w1),
                "wgrad2": (self.dy_rows.t(), self.a), "wgrad1": (self.dh.t(), self.x_rows)}

    def swiglu(self):
        rows, inter = self.h.shape[0], self.h.shape[1] // 2
        a = self.h.new_empty(rows, inter)
        if rows > 0:
            swiglu_kernel[rows, triton.cdiv(inter, BLOCK)](self.h, self.row_probs, a, inter, BLOCK)
        return a

    def swiglu_backward(self, da):
        """Writes dh, and a again; returns the probabilities' gradients by row."""
        rows, inter = da.shape
        self.dh, self.a = torch.empty_like(self.h), torch.empty_like(da)
        dprobs = torch.empty_like(self.row_probs)
        if rows > 0:
            swiglu_backward_kernel[rows,](self.h, self.row_probs, da, self.dh, dprobs, self.a,
                                          inter, BLOCK)
        return dprobs

    def sum_over_k(self, sent):
        tokens, topk = self.inputs.probs.shape
        hidden = sent.shape[1]
        out = sent.new_empty(tokens, hidden)
        sum_over_k_kernel[tokens, triton.cdiv(hidden, BLOCK)](
            sent, self.exchange.sent_of_slot, out, hidden, topk, BLOCK)
        return out
