"""Both layers of one shape: what they are asked for, checked and timed."""
import time
from contextlib import contextmanager
from dataclasses import dataclass

from compare import group, shapes, timing
from compare.figures import StageTimes, Times, TimeUse
from compare.inputs import Weights, make_inputs
from compare.plain_layer import PlainLayer
from compare.torch_layer import Exchange, TorchLayer
from compare.uniep_layer import UniepLayer, check_backward, check_forward


class Clock:
    """Seconds of the host by what they were spent on."""

    def __init__(self):
        self.seconds = {}

    @contextmanager
    def charge(self, what):
        begin = time.monotonic()
        yield
        group.together()
        self.seconds[what] = self.seconds.get(what, 0) + time.monotonic() - begin


@dataclass(frozen=True)
class ScheduleTimes:
    """One direction of uniep under one schedule."""
    times: Times
    traced: Times | None  # with the timeline on
    use: TimeUse | None  # what the timeline of the last turn says
    stages: dict  # StageTimes of those that have a launch of their own, by name


class Notes:
    """What uniep tells after every turn of a call: its stages' times, or a timeline."""

    def __init__(self, comparison, traced):
        self.comparison, self.traced = comparison, traced
        self.turn, self.stages, self.use = 0, [], None

    def take(self):
        self.turn += 1
        c = self.comparison
        if not self.traced:
            if not c.args.no_stages:
                self.stages.append(c.uniep.last_pass())
        elif self.turn < timing.WARMUPS + c.args.iterations:
            c.traced.synchronize()  # drops the timeline
        else:
            self.use = c.traced.time_use()

    def stage_times(self):
        """StageTimes by name."""
        turns = self.stages[-self.comparison.args.iterations:]  # without those for warming up
        if not turns:
            return {}
        ranks = group.gather_numbers([list(turn.values()) for turn in turns])
        times = {stage: StageTimes([[stages[i] for stages in turn] for turn in zip(*ranks)])
                 for i, stage in enumerate(turns[0])}
        return {stage: t for stage, t in times.items() if t.slowest.ms > 0}

    def time_use(self):
        ranks = group.gather_numbers(list(self.use.values()))
        return TimeUse.of_ranks([dict(zip(self.use, figures)) for figures in ranks],
                                [name for name in self.use if name in self.comparison.stage_names])


class Comparison:
    """`weights` are those of another shape of the same model, if there was one before."""

    def __init__(self, library, shape, args, weights=None):
        self.shape, self.args, self.stage_names = shape, args, library.stages
        self.clock = Clock()
        with self.clock.charge("tensors"):
            self.weights = weights or Weights(shape)
            self.inputs = make_inputs(shape, self.weights)
            self.exchange = Exchange(self.inputs.ids, shape.experts)
            self.torch = TorchLayer(self.inputs, self.exchange)
            all_ids = group.all_gather(self.inputs.ids)
            self.wire = shapes.wire_of(all_ids, shape)
            rows_per_expert = all_ids.flatten().bincount(minlength=shape.experts).tolist()
            self.rows = shapes.rank_rows(rows_per_expert, group.size())
        with self.clock.charge("layers"):
            capacity = shapes.capacity_rows(shape, group.size(), rows_per_expert)
            self.uniep = self.make_layer(library, capacity)
            self.traced = self.make_layer(library, capacity, trace=True) if args.trace else None

    def make_layer(self, library, capacity, trace=False):
        layer = UniepLayer(library, self.shape, self.inputs, self.weights, capacity, trace)
        layer.plan()
        layer.synchronize()
        return layer

    def close(self):
        for layer in (self.uniep, self.traced):
            if layer is not None:
                layer.close()

    def check(self):
        """What a record says about the bits, by (direction, schedule)."""
        with self.clock.charge("check"):
            plain, checks = PlainLayer(self.inputs, self.exchange), {}
            want, offsets = plain.forward(), self.exchange.offsets.tolist()
            for schedule in self.args.forward:
                wrong = check_forward(self.uniep, self.shape, schedule, want, offsets)
                checks["forward", schedule] = {"wrong": wrong}
            want = plain.backward()
            for schedule in self.args.backward:
                wrong, distance = check_backward(self.uniep, schedule, want)
                checks["backward", schedule] = {"wrong": wrong, "dprobs_rel_l2": distance}
            return checks

    def time_products(self):
        with self.clock.charge("products"):
            self.torch.forward()
            self.torch.backward()
            return timing.time_products(self.torch.products(), self.exchange.offsets,
                                        self.args.iterations, self.is_even())

    def is_even(self):
        """Whether a layer with as many rows for each expert is like this one."""
        return self.shape.skew == 0 and min(self.rows) >= self.shape.experts // group.size()

    def time_plan(self):
        with self.clock.charge("passes"):
            ranks, = timing.measure([self.uniep.plan], self.args.iterations)
            self.uniep.synchronize()
            return Times.of_slowest(ranks)

    def time_direction(self, direction, schedules):
        """The torch layer's Times, and the ScheduleTimes of each schedule."""
        torch_call = getattr(self.torch, direction)
        calls = self.calls(self.uniep, direction, schedules)
        traced = self.calls(self.traced, direction, schedules) if self.traced else []
        notes = [Notes(self, traced=False) for _ in calls] + [Notes(self, traced=True)
                                                              for _ in traced]
        with self.clock.charge("passes"):
            ranks = timing.measure(
                [torch_call, *calls, *traced], self.args.iterations,
                after=lambda number: number > 0 and notes[number - 1].take(),
                before=[torch_call, *calls, *calls[:len(traced)]])
            self.uniep.synchronize()
            times = [Times.of_slowest(values) for values in ranks]
            stages = [note.stage_times() for note in notes[:len(calls)]]
            uses = [note.time_use() for note in notes[len(calls):]]
        missing = [None] * (len(calls) - len(traced))
        of_traced = times[1 + len(calls):] + missing
        return times[0], [ScheduleTimes(*row) for row in zip(times[1:], of_traced, uses + missing,
                                                             stages)]

    @staticmethod
    def calls(layer, direction, schedules):
        call = getattr(layer, direction)
        return [lambda schedule=schedule: call(schedule) for schedule in schedules]
