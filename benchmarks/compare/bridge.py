"""uniep.Layer by way of benchmarks/bridge.cpp, whose functions are declared here again."""
import ctypes

POINTER, LONG, INT, TEXT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p
TO = ctypes.POINTER

# What uniep_bridge_time_use writes before the stages.
TIME_USE = ("processors", "span_s", "exposed_s", "tail_s", "waiting_s", "idle_s", "clock_hz")

# Arguments of the functions that return 0 or 1; the first one of most is the layer.
SIGNATURES = {
    "schedule": [TEXT, TO(TEXT)],
    "create": [LONG, LONG, INT, INT, LONG, LONG, POINTER, INT, INT, TO(POINTER)],
    "layer_schedule": [POINTER, INT, TO(TEXT)],
    "plan": [POINTER, POINTER, LONG],
    "forward": [POINTER] * 6 + [TEXT],
    "backward": [POINTER] * 8 + [TEXT],
    "synchronize": [POINTER],
    "last_pass": [POINTER, TO(ctypes.c_double), TO(ctypes.c_double)],
    "time_use": [POINTER, TO(ctypes.c_double)],
    "saved_h": [POINTER, TO(POINTER), TO(LONG)],
}


class UniepError(RuntimeError):
    """What the library refused or failed at, in its sentence."""


class Library:
    def __init__(self, path):
        self._library = ctypes.CDLL(path)
        for name, arguments in SIGNATURES.items():
            self._function(name, ctypes.c_int, arguments)
        self._function("destroy", None, [POINTER])
        self._error = self._function("error", TEXT, [])
        self.commit = self._function("commit", TEXT, [])().decode()
        stage = self._function("stage", TEXT, [INT])
        self.stages = [name.decode() for name in iter_stages(stage)]

    def _function(self, name, result, arguments):
        function = getattr(self._library, "uniep_bridge_" + name)
        function.restype, function.argtypes = result, arguments
        return function

    def call(self, name, *arguments):
        """Throws where the function fails."""
        if getattr(self._library, "uniep_bridge_" + name)(*arguments) != 0:
            raise UniepError(self._error().decode())

    def full_schedule(self, text):
        """Every axis of a schedule; throws where `text` is none."""
        full = TEXT()
        self.call("schedule", text.encode(), ctypes.byref(full))
        return full.value.decode()

    def destroy(self, handle):
        self._library.uniep_bridge_destroy(handle)


def iter_stages(stage):
    number = 0
    while (name := stage(number)) is not None:
        yield name
        number += 1


def address(tensor):
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor has strides {tensor.stride()}; contiguous ones are accepted")
    return tensor.data_ptr()


class Layer:
    """uniep::Layer of a shape (compare/shapes.py). Arguments are tensors of its device."""

    def __init__(self, library, shape, ranks, capacity_rows, stream, trace=False, looks_up=False):
        self._library = library
        self._local_experts = shape.experts // ranks
        self._handle = POINTER()
        library.call("create", shape.hidden, shape.intermediate, shape.experts, shape.topk,
                     shape.tokens, capacity_rows, stream, int(trace), int(looks_up),
                     ctypes.byref(self._handle))

    def close(self):
        """Collective."""
        self._library.destroy(self._handle)
        self._handle = POINTER()

    def schedule(self, direction):
        """What a layer that `looks_up` found for a direction, every axis."""
        full = TEXT()
        self._library.call("layer_schedule", self._handle, int(direction == "backward"),
                           ctypes.byref(full))
        return full.value.decode()

    def plan(self, ids):
        self._library.call("plan", self._handle, address(ids), ids.shape[0])

    def forward(self, x, probs, w1, w2, out, schedule):
        self._library.call("forward", self._handle, address(x), address(probs), address(w1),
                           address(w2), address(out), schedule.encode())

    def backward(self, dy, w1, w2, dx, dprobs, dw1, dw2, schedule):
        self._library.call("backward", self._handle, address(dy), address(w1), address(w2),
                           address(dx), address(dprobs), address(dw1), address(dw2),
                           schedule.encode())

    def synchronize(self):
        """Waits for all passes, and throws what went wrong in them; drops their timelines."""
        self._library.call("synchronize", self._handle)

    def last_pass(self):
        """Milliseconds of the stages of the last pass, by name; 0: the pass has no such stage."""
        elapsed = ctypes.c_double()
        stages = (ctypes.c_double * len(self._library.stages))()
        self._library.call("last_pass", self._handle, ctypes.byref(elapsed), stages)
        return dict(zip(self._library.stages, stages))

    def time_use(self):
        """How this rank's SMs spent the pass since `synchronize`, of a layer with `trace`: what
        TIME_USE names, and seconds of the stages."""
        names = [*TIME_USE, *self._library.stages]
        figures = (ctypes.c_double * len(names))()
        self._library.call("time_use", self._handle, figures)
        return dict(zip(names, figures))

    def saved_h(self):
        """Device address of h of the last forward, and the first row of every local expert."""
        h = POINTER()
        begin = (LONG * (self._local_experts + 1))()
        self._library.call("saved_h", self._handle, ctypes.byref(h), begin)
        return h.value, list(begin)
