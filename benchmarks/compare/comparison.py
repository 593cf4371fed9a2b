"""Both layers of one shape: what they are asked for, checked and timed."""
import time
from contextlib import contextmanager
from dataclasses import dataclass

from compare import group, shapes, timing
from compare.figures import PRODUCTS, StageTimes, Times, TimeUse
from compare.inputs import Weights, make_inputs
from compare.plain_layer import PlainLayer
from compare.timing import Timed
from compare.torch_layer import Exchange, TorchLayer
from compare.uniep_layer import AUTO, UniepLayer, check_backward, check_forward


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


class StageLog:
    """The milliseconds of uniep's stages, turn by turn."""

    def __init__(self, layer):
        self.layer, self.turns = layer, []

    def take(self):
        self.turns.append(self.layer.last_pass())

    def times(self, iterations):
        """StageTimes by name, without turns for warming up."""
        turns = self.turns[-iterations:]
        ranks = group.gather_numbers([list(turn.values()) for turn in turns])
        times = {stage: StageTimes([[stages[i] for stages in turn] for turn in zip(*ranks)])
                 for i, stage in enumerate(turns[0])}
        return {stage: t for stage, t in times.items() if t.slowest.ms > 0}


class TraceLog:
    """The timeline of the last turn; those before it are dropped."""

    def __init__(self, layer, turns):
        self.layer, self.turns_left, self.figures = layer, turns, None

    def take(self):
        self.turns_left -= 1
        if self.turns_left > 0:
            self.layer.synchronize()
        else:
            self.figures = self.layer.time_use()

    def use(self, stages):
        ranks = group.gather_numbers(list(self.figures.values()))
        return TimeUse.of_ranks([dict(zip(self.figures, rank)) for rank in ranks], stages)


class Comparison:
    """`weights` are those of another shape of the same model, if there was one before."""

    def __init__(self, library, shape, args, weights=None):
        self.library, self.shape, self.args = library, shape, args
        self.stage_names = library.stages
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
            self.uniep = self.make_layer(capacity)
            self.traced = self.make_layer(capacity, trace=True) if args.trace else None

    def make_layer(self, capacity, trace=False):
        looks_up = AUTO in self.args.forward + self.args.backward
        layer = UniepLayer(self.library, self.shape, self.inputs, self.weights, capacity, trace,
                           looks_up)
        layer.plan()
        layer.synchronize()
        return layer

    def close(self):
        for layer in (self.uniep, self.traced):
            if layer is not None:
                layer.close()

    def full_schedule(self, direction, schedule):
        """Every axis of it."""
        return self.library.full_schedule(self.uniep.parsable(direction, schedule))

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
                                        self.args.iterations, self.is_even(), self.torch_pass,
                                        self.args.sustain)

    def torch_pass(self, product):
        """The pass of the torch layer that has the product."""
        return self.torch.forward if product in PRODUCTS["forward"] else self.torch.backward

    def is_even(self):
        """Whether a layer with as many rows for each expert is like this one."""
        return self.shape.skew == 0 and min(self.rows) >= self.shape.experts // group.size()

    def time_plan(self):
        with self.clock.charge("passes"):
            ranks, = timing.measure([Timed(self.uniep.plan)], self.args.iterations)
            self.uniep.synchronize()
            return Times.of_slowest(ranks)

    def time_direction(self, direction, schedules):
        """The torch layer's Times, and the ScheduleTimes of each schedule."""
        iterations = self.args.iterations
        calls = self.calls(self.uniep, direction, schedules)
        stages = [] if self.args.no_stages else [StageLog(self.uniep) for _ in calls]
        after = [log.take for log in stages] or [None] * len(calls)
        timed = [Timed(getattr(self.torch, direction)),
                 *(Timed(call, after=take) for call, take in zip(calls, after))]
        traces = []
        if self.traced:
            traces = [TraceLog(self.traced, timing.WARMUPS + iterations) for _ in calls]
            timed += [Timed(call, before=untraced, after=log.take) for call, untraced, log
                      in zip(self.calls(self.traced, direction, schedules), calls, traces)]
        with self.clock.charge("passes"):
            times = [Times.of_slowest(ranks)
                     for ranks in timing.measure(timed, iterations, self.args.sustain)]
            self.uniep.synchronize()
        of_torch, of_traced = times[0], times[1 + len(calls):]
        return of_torch, [
            ScheduleTimes(times=times[1 + i], traced=of_traced[i] if traces else None,
                          use=traces[i].use(self.stage_names) if traces else None,
                          stages=stages[i].times(iterations) if stages else {})
            for i in range(len(calls))]

    @staticmethod
    def calls(layer, direction, schedules):
        call = getattr(layer, direction)
        return [lambda schedule=schedule: call(schedule) for schedule in schedules]
