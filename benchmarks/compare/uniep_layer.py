"""uniep on the tensors of a comparison, and whether it gave the right bits."""
import torch

from compare import bridge, group

AUTO = "auto"  # names the schedules that a layer looks up
AT_ONCE = 1 << 28  # elements that are compared
DPROBS_TOLERANCE = 1e-5  # relative L2: PyTorch sums dprobs in another order


class UniepLayer:
    """Schedules are texts that the library parses, or AUTO where the layer `looks_up` its own."""

    def __init__(self, library, shape, inputs, weights, capacity_rows, trace=False, looks_up=False):
        self.inputs = inputs
        stream = torch.cuda.current_stream().cuda_stream
        self._layer = bridge.Layer(library, shape, group.size(), capacity_rows, stream, trace,
                                   looks_up)
        self._looked_up = {direction: self._layer.schedule(direction)
                           for direction in ("forward", "backward") if looks_up}
        self.synchronize = self._layer.synchronize
        self.last_pass = self._layer.last_pass
        self.time_use = self._layer.time_use
        self.results = {"out": torch.empty_like(inputs.x), "dx": torch.empty_like(inputs.dy),
                        "dprobs": torch.empty_like(inputs.probs), "dw1": weights.dw1,
                        "dw2": weights.dw2}

    def parsable(self, direction, schedule):
        return self._looked_up[direction] if schedule == AUTO else schedule

    def plan(self):
        self._layer.plan(self.inputs.ids)

    def forward(self, schedule):
        t = self.inputs
        self._layer.forward(t.x, t.probs, t.w1, t.w2, self.results["out"],
                            self.parsable("forward", schedule))

    def backward(self, schedule):
        t, r = self.inputs, self.results
        self._layer.backward(t.dy, t.w1, t.w2, r["dx"], r["dprobs"], r["dw1"], r["dw2"],
                             self.parsable("backward", schedule))

    def poison(self):
        """So that what a pass does not write is found."""
        for tensor in self.results.values():
            tensor.fill_(float("nan"))

    def close(self):
        self.synchronize()
        group.together()  # no peer reads this rank's memory any more
        self._layer.close()
        group.together()

    def saved_h(self, shape):
        """h of the last forward: for each local expert its rows, and behind them what pads them."""
        address, begin = self._layer.saved_h()
        rows = torch.as_tensor(DeviceRows(address, begin[-1], 2 * shape.intermediate),
                               device=group.DEVICE)
        return [rows[first:last] for first, last in zip(begin, begin[1:])]


class DeviceRows:
    """bf16 rows in device memory, which PyTorch takes as int16 without a copy."""

    def __init__(self, address, rows, columns):
        self.__cuda_array_interface__ = {"shape": (rows, columns), "typestr": "<i2",
                                         "data": (address, False), "version": 3}


def wrong_bits(got, want):
    """Number of elements of bf16 tensors that differ in any bit. In pieces: beside the gradients of
    a large layer there is no room for as many booleans."""
    assert got.shape == want.shape, f"{tuple(got.shape)} instead of {tuple(want.shape)}"
    pieces = zip(*(t.view(torch.int16).flatten().split(AT_ONCE) for t in (got, want)))
    return sum(int((a != b).sum()) for a, b in pieces)


def wrong_h(segments, want, offsets):
    """`want` has the experts' rows one after another; `segments` pads each expert's."""
    wrong = 0
    for segment, first, last in zip(segments, [0] + offsets, offsets):
        wrong += wrong_bits(segment[:last - first], want[first:last])
    return wrong


def dprobs_distance(got, want):
    """Relative L2 over all ranks."""
    difference = (got.double() - want.double()).square().sum()
    squared, norm = group.total([float(difference), float(want.double().square().sum())])
    return (squared / max(norm, 1e-300)) ** 0.5


def check_forward(layer, shape, schedule, want, offsets):
    """Elements of h and out, of all ranks, whose bits are not those of `want`."""
    layer.poison()
    layer.forward(schedule)
    layer.synchronize()
    wrong = wrong_bits(layer.results["out"], want["out"])
    wrong += wrong_h(layer.saved_h(shape), want["h"], offsets)
    return int(group.total([wrong])[0])


def check_backward(layer, schedule, want):
    """The same of dx, dw1 and dw2, and the distance of dprobs, whose elements count as wrong where
    it is too far off."""
    layer.poison()
    layer.backward(schedule)
    layer.synchronize()
    wrong = sum(wrong_bits(layer.results[name], want[name]) for name in ("dx", "dw1", "dw2"))
    distance = dprobs_distance(layer.results["dprobs"], want["dprobs"])
    if not distance <= DPROBS_TOLERANCE:  # NaN is too far
        wrong += want["dprobs"].numel()
    return int(group.total([wrong])[0]), distance
