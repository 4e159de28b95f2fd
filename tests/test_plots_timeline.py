"""The timeline: who waits and how much KV is taken, against hand-computed runs and the slow twin."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from matplotlib.collections import PolyCollection

from dsim.cli.simulate import _log_files
from dsim.errors import InputError
from dsim.pools import Policy
from dsim.result import Result
from dsim.simulate import simulate
from experiments.plots.runlog import Instance, Level, LoggedStep, RunLog, read_run
from experiments.plots.timeline import lanes_of, timeline_figure, total, window_of
from tests import reference
from tests.cli import Cli
from tests.reference.simulator import _Colocated, _Disaggregated, _OpenLoop, _Run, _system
from tests.reference.state import Request
from tests.reference.systems import every_role
from tests.test_twin import System, systems

P0, D0 = Instance("P", 0), Instance("D", 0)


def log_of(result: Result, folder: Path) -> RunLog:
    """Write the files of a run and read them again."""
    for name, text in _log_files(result).items():
        (folder / name).write_text(text)
    blocks = {role.name.lower(): count for role, count in result.kv_blocks.items()}
    (folder / "summary.json").write_text(json.dumps({"kv_blocks": blocks}))
    return read_run(folder)


class Watched(_Run):
    """The twin, which also notes at the end of each instant how many blocks are taken and who waits where."""

    def __init__(self, system: _Disaggregated | _Colocated, source: _OpenLoop) -> None:
        super().__init__(system, source)
        self.kv: dict[Instance, dict[float, int]] = {}
        self.waiting: dict[Instance, dict[float, int]] = {}
        #: At the end of each instant: prompts on their way to a decode instance that is not chosen yet.
        self.hopping: dict[float, list[Request]] = {}

    def _instant(self, now: float) -> None:
        super()._instant(now)
        if isinstance(self.system, _Disaggregated):
            self.hopping[now] = [request for _, request in self.system.to_hand_over]
        for each in self.system.instances:
            if isinstance(each, reference.prefill.PrefillInstance):
                self._note(now, Instance("P", each.index), each.cache.used, len(each.queue))
            elif isinstance(each, reference.decode.DecodeInstance):
                places = (each.unpulled, each.in_transfer, each.pulled, each.preempted)
                # Layer-wise, prompts are handed over before their prefill has ended.
                ready = [request for place in places for request in place if request.prefill_end_s <= now]
                self._note(now, Instance("D", each.index), each.cache.used, len(ready))
            else:
                taken = sum(loop.cache.used for loop in each.loops)
                waiting = sum(len(loop.waiting) + len(loop.preempted) for loop in each.loops)
                self._note(now, Instance("C", each.index), taken, waiting)

    def _note(self, now: float, instance: Instance, taken: int, waiting: int) -> None:
        self.kv.setdefault(instance, {})[now] = taken
        self.waiting.setdefault(instance, {})[now] = waiting


def watched(system: System) -> Watched:
    """Run the twin."""
    trace, options = system.trace, system.options
    columns = (trace.arrival_s, trace.prompt_tokens, trace.output_tokens, trace.cached_prompt_tokens)
    requests = [
        Request(id=i, arrival_s=float(at_s), prompt=int(prompt), output=int(output), cached=int(cached))
        for i, (at_s, prompt, output, cached) in enumerate(zip(*columns, strict=True))
    ]
    front, back = options.prefill_routing.value, options.decode_routing.value
    limit = options.prefill_token_limit_at(system.placement.pools[0].parallelism.tp)
    parts = _system(system.placement, every_role(system.profile), options.seed, front, back, front, limit)
    run = Watched(parts, _OpenLoop(requests))
    run.result()
    for instance, counts in run.waiting.items():
        if instance.role == "D":
            for now, hopping in run.hopping.items():
                counts[now] += sum(request.decode_instance == instance.index for request in hopping)
    return run


@settings(max_examples=40)
@given(systems(dyadic=True))
def test_queues_and_kv_are_the_twins(tmp_path_factory: pytest.TempPathFactory, system: System) -> None:
    twin = watched(system)
    options = dataclasses.replace(system.options, log_steps=True)
    result = simulate(system.placement, system.trace, profiles=every_role(system.profile), options=options)
    assume(result.steps)  # every request may have been rejected
    log = log_of(result, tmp_path_factory.mktemp("run"))
    for instance, taken in twin.kv.items():
        level = log.kv_blocks(instance)
        assert {at_s: level.at(at_s) for at_s in taken} == taken, instance
    pool = system.placement.pools[-1]
    for instance, expected in twin.waiting.items():
        level = log.waiting(instance)
        if instance.role == "P" and system.profile.request_s == 0:
            assert {at_s: level.at(at_s) for at_s in expected} == expected, instance
        elif instance.role != "P" and pool.parallelism.pp == 1 and pool.policy is not Policy.CHUNKED:
            # A preemption shows at the next decode launch; the front end's time counts as waiting here.
            launches = [step.launch_s for step in log.steps if step.instance == instance and step.decode]
            if instance.role == "D" or system.profile.request_s == 0:
                assert {at_s: level.at(at_s) for at_s in launches} == {at_s: expected[at_s] for at_s in launches}, (
                    instance
                )


def test_the_highest_of_the_kv_log_is_the_peak_of_the_result(tmp_path: Path, cli: Cli) -> None:
    arguments = "simulate -m 13b -p 2xP:tp1pp1+2xD:tp1pp1 -r 8 -n 200 --warmup 20 --kv-blocks 300 --step-log -q -o"
    assert cli(*arguments.split(), str(tmp_path)).code == 0
    log = read_run(tmp_path)
    result = json.loads((tmp_path / "summary.json").read_text())
    for role, letter in (("prefill", "P"), ("decode", "D")):
        most = max(max(log.kv_blocks(Instance(letter, index)).value) for index in (0, 1))
        assert most / 300 == pytest.approx(result["kv_peak"][role], abs=1e-12)
    assert result["preemptions"] > 0
    # Preempted requests wait, and all have decoded in the end who had started to.
    assert max(log.waiting(D0).value) > 1


def hand_made() -> RunLog:
    """Two prompts of one prefill instance, decoded together; the first is preempted once.

    0: arrives at 0, prefill 0 to 1, transfer 1 to 1.5, decodes from 2, is left out of the step at 3 and back at 4.
    1: arrives at 0.5, prefill 1 to 2, transfer 2 to 2.5, decodes from 3.
    """
    steps = (
        LoggedStep(P0, 0, 0.0, 1.0, (0,), ()),
        LoggedStep(P0, 0, 1.0, 2.0, (1,), ()),
        LoggedStep(D0, 0, 2.0, 3.0, (), (0,)),
        LoggedStep(D0, 0, 3.0, 4.0, (), (1,)),
        LoggedStep(D0, 0, 4.0, 5.0, (), (1, 0)),
    )
    columns = {
        "arrival_s": [0.0, 0.5],
        "prefill_start_s": [0.0, 1.0],
        "prefill_end_s": [1.0, 2.0],
        "transfer_start_s": [1.0, 2.0],
        "transfer_end_s": [1.5, 2.5],
        "decode_start_s": [2.0, 3.0],
        "last_token_s": [5.0, 5.0],
        "prefill_instance": [0, 0],
        "decode_instance": [0, 0],
        "output_tokens": [3, 3],
    }
    kv = {
        (P0, 0): (np.array([0.0, 1.0, 1.5, 2.5]), np.array([2.0, 5.0, 3.0, 0.0])),
        (D0, 0): (np.array([1.0, 2.0, 3.0, 3.0, 4.0, 5.0]), np.array([2.0, 5.0, 3.0, 4.0, 6.0, 0.0])),
    }
    summary = {"kv_blocks": {"prefill": 10, "decode": 20}}
    return RunLog(summary, {name: np.array(values) for name, values in columns.items()}, steps, kv)


def test_a_run_by_hand() -> None:
    log = hand_made()
    prefill = log.waiting(P0)
    assert [prefill.at(at_s) for at_s in (0.0, 0.49, 0.5, 0.99, 1.0)] == [0, 0, 1, 1, 0]
    # Request 0 from 1 to 2 and, preempted, from 3 to 4; request 1 from 2 to 3.
    decode = log.waiting(D0)
    assert [decode.at(at_s) for at_s in (0.9, 1.0, 1.9, 2.0, 2.9, 3.0, 3.9, 4.0)] == [0, 1, 1, 1, 1, 1, 1, 0]
    taken = log.kv_blocks(D0)
    # The two changes at 3 are one step of the line.
    assert [taken.at(at_s) for at_s in (0.5, 1.0, 2.5, 3.0, 4.5, 5.0)] == [0, 2, 5, 4, 6, 0]
    assert sorted(log.transfers(0)) == [(1.0, 1.5), (2.0, 2.5)]


def test_lanes_are_cut_to_the_window() -> None:
    transfers, decode = lanes_of(hand_made(), D0, 2.25, 3.5)
    assert [(span.start_s, span.end_s) for span in transfers.spans] == [(2.25, 2.5)]
    assert [(span.what, span.start_s, span.end_s) for span in decode.spans] == [
        ("decode", 2.25, 3.0),
        ("decode", 3.0, 3.5),
    ]
    assert (transfers.label, decode.label) == ("D0 KV in", "D0")


def test_the_figure_draws_bars_queues_and_kv() -> None:
    shown = timeline_figure(hand_made(), window_s=(0.0, 5.0), title="by hand")
    lanes, prefill, decode, kv = shown.axes
    assert [tick.get_text() for tick in lanes.get_yticklabels()] == ["P0", "D0 KV in", "D0"]
    bars = [collection for collection in lanes.collections if isinstance(collection, PolyCollection)]
    boxes = [np.asarray(path.vertices) for collection in bars for path in collection.get_paths()]
    spans = sorted((float(box[:, 0].min()), float(box[:, 0].max())) for box in boxes)
    assert spans == [(0.0, 1.0), (1.0, 1.5), (1.0, 2.0), (2.0, 2.5), (2.0, 3.0), (3.0, 4.0), (4.0, 5.0)]
    assert np.asarray(prefill.get_lines()[0].get_xydata()).tolist() == [[0, 0], [0.5, 1], [1, 0], [5, 0]]
    assert [axes.get_ylabel() for axes in (prefill, decode, kv)] == [
        "waiting\nfor prefill\n(requests)",
        "waiting\nto decode\n(requests)",
        "KV taken\n(%)",
    ]
    at_s, share = np.asarray(kv.get_lines()[1].get_xydata()).T
    assert at_s.tolist() == [0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(share, [0, 10, 25, 20, 30, 30])
    assert kv.get_xlabel() == "time since the start of the run (s)"
    assert [text.get_text() for text in shown.legends[0].get_texts()] == [
        "prefill",
        "decode",
        "KV transfer",
        "P0",
        "D0",
    ]


def test_levels_add_up() -> None:
    one = Level(np.array([1.0, 3.0]), np.array([2.0, 0.0]))
    other = Level(np.array([2.0, 3.0]), np.array([5.0, 1.0]))
    both = total([one, other, Level(np.empty(0), np.empty(0))])
    assert [both.at(at_s) for at_s in (0.5, 1.0, 2.0, 3.0)] == [0, 2, 7, 1]
    assert [values.tolist() for values in one.window(2.0, 4.0)] == [[2, 3, 4], [2, 0, 0]]


def test_the_window_is_within_the_run() -> None:
    log = hand_made()
    start_s, end_s = window_of(log)
    assert 0 <= start_s < end_s
    for window, message in (((6.0, 7.0), "lies outside the run; the run lasts 5 s"), ((2.0, 2.0), "must start before")):
        with pytest.raises(InputError, match=message):
            timeline_figure(log, window_s=window)
