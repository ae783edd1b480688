"""The judges alone, on runs made by hand: what they see, what they say, and which mistake explains it."""

import importlib

import pytest
import torch
import torch.distributed as dist

from manyranks.grade import answers, check, trial
from manyranks.grade.check import Record, Task, loaded
from manyranks.grade.judges import NOTHING, WAIT, around, at_most, facts, messages, parting, sent, silent, values
from manyranks.grade.learner import Allowed, refuse_class, refused
from manyranks.grade.trial import Event, Seen, Sent, Trial
from manyranks.measure.fingerprints import difference, print_of, same
from manyranks.measure.journal import Stopped
from manyranks.measure.mistakes import Mistake, changed
from manyranks.measure.watch import OVERWROTE, Watch
from manyranks.world.strangers.trouble import Trouble

WEIGHT = torch.arange(100, dtype=torch.float64)


def reduced(size: int, op: str = "all_reduce", peer: int | None = None) -> Sent:
    return Sent(op, size, "float64", peer, (0, 1))


ONCE = (reduced(800),)


def seen(weight=WEIGHT, calls=ONCE, marks=(), **results) -> Seen:
    events = [Event("call", call.op, call.bytes) for call in calls] + [Event("mark", mark) for mark in marks]
    return Seen({"the weight": weight, **results}, events, list(calls))


def judged(judge, *ranks: Seen, right: Seen | None = None, unwaited=()):
    """The judge's verdict on these ranks, where each should be like `right`."""
    one = Trial(len(ranks), "", "2/0", list(ranks), unwaited)
    return judge.verdict(one, [right or seen()] * len(ranks))


VALUES = values(0.5, "is right", "weight")


def test_a_number_that_is_none_is_not_few():
    judge = at_most(1.0, "holds little", "bytes")
    for got, fine in ((5.0, True), (2.0, True), (6.0, False), (float("nan"), False), (-1.0, False)):
        trial = Trial(1, "", "1/0", [Seen({"bytes": got})])
        assert judge.verdict(trial, [Seen({"bytes": 5.0})]).ok is fine


def test_right_values_hold():
    assert judged(VALUES, seen(), seen()).ok


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (seen(WEIGHT + 1), "rank 1: the weight: element 0 is 1, right is 0"),
        (seen(WEIGHT[:7]), "rank 1: the weight: [7] of float64; right is [100] of float64"),
        (seen(WEIGHT.float()), "rank 1: the weight: [100] of float32; right is [100] of float64"),
        (seen(WEIGHT.index_fill(0, torch.tensor([3]), 7)), "rank 1: the weight: some of its 100 elements are wrong"),
        (seen(WEIGHT * float("nan")), "rank 1: the weight: element 0 is nan, right is 0"),
        (seen(marks=[OVERWROTE]), "rank 1 changed a tensor while it was being sent"),
    ],
)
def test_a_wrong_value_is_named_with_its_rank(wrong, says):
    verdict = judged(VALUES, seen(), wrong)
    assert not verdict.ok
    assert verdict.found == says


def test_values_that_are_right_without_communication_are_not():
    verdict = judged(VALUES, seen(calls=()), seen(calls=()))
    assert (verdict.ok, verdict.hint, verdict.firm) == (False, NOTHING, True)
    assert judged(values(0.5, "", "weight", alone=True), seen(calls=()), seen(calls=())).ok


def test_values_that_nobody_waited_for_are_luck():
    verdict = judged(VALUES, seen(), seen(), unwaited=((1, "all_reduce"),))
    assert (verdict.ok, verdict.hint) == (False, WAIT)


def test_what_was_sent_without_the_check_s_knowledge_is_told():
    hidden = Seen({"the weight": WEIGHT}, [], [reduced(800)])
    assert "what the check noted is not what was sent" in judged(VALUES, seen(), hidden).found


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ((), "rank 1 called nothing (0 bytes); right is 1 × all_reduce (800 bytes)"),
        ((reduced(800), reduced(8)), "rank 1 called 2 × all_reduce (808 bytes); right is 1 × all_reduce (800 bytes)"),
        (
            (reduced(400),),
            "rank 1 called all_reduce of 400 bytes among 2 ranks; right is all_reduce of 800 bytes among 2 ranks",
        ),
    ],
)
def test_other_calls_are_counted(calls, says):
    assert judged(sent(0.5, "sends once"), seen(), seen(calls=calls)).found == says


def test_half_the_bytes_are_float32():
    assert "float64 is sent as float64" in judged(sent(0.5, ""), seen(), seen(calls=[reduced(400)])).hint


def test_messages_go_to_their_ranks_and_in_their_order():
    right = seen(calls=[reduced(8, "send", 1), reduced(8, "send", 0)])
    turned = seen(calls=[reduced(8, "send", 0), reduced(8, "send", 1)])
    assert (
        judged(messages(0.5, ""), right, turned, right=right).found
        == "rank 1 sent to rank 0 and rank 1; right is rank 1 and rank 0"
    )
    assert judged(messages(0.5, "", in_order=False), right, turned, right=right).ok


def test_an_order_is_shown_around_the_place_where_it_is_another():
    right, wrong = ["F 0", "F 1", "B 0"], ["F 0", "B 0", "F 1"]
    assert (around(wrong, at := parting(wrong, right)), around(right, at)) == ("F 0, B 0, F 1", "F 0, F 1, B 0")


def test_numbers_may_be_smaller_but_not_larger_and_facts_neither():
    for got, least, equal in ((2, True, False), (3, True, True), (4, False, False)):
        ranks, right = (seen(steps=got), seen(steps=3)), seen(steps=3)
        assert judged(at_most(0.5, "", "steps"), *ranks, right=right).ok == least
        assert judged(facts(0.5, "", "steps"), *ranks, right=right).ok == equal
    assert judged(at_most(0.5, "", "steps"), seen(steps=None), seen(steps=3), right=seen(steps=3)).ok is None


def test_silent_ranks():
    assert not judged(silent(0.5, ""), seen(), seen()).ok
    assert judged(silent(0.5, ""), seen(calls=()), seen(calls=())).ok


TASK = Task("99_none", "double(x)", 2, lambda *_: {}, (VALUES, sent(0.5, "sends once")), worlds=(2,))


def mistake(name: str, weight, calls=ONCE) -> Mistake:
    ranks = [changed(check.looks(TASK, seen(weight, calls)), check.looks(TASK, seen()))] * 2
    return Mistake(name, f"that is {name}", {"2/0": ranks}, {})


RECORD = Record(
    {"2/0": [seen(), seen()]},
    (
        mistake("twice", 2 * WEIGHT),
        mistake("twice as much", WEIGHT, [reduced(1600)]),
        mistake("both", 3 * WEIGHT, [reduced(16)]),
    ),
)


def told(*ranks: Seen) -> list[str]:
    report = check.report(TASK, print, [Trial(2, "", "2/0", list(ranks))], RECORD)
    return [line.hint for line in report.lines if not line.ok]


def test_a_mistake_is_told_where_all_that_it_changes_is_changed_so():
    assert told(seen(2 * WEIGHT), seen(2 * WEIGHT)) == ["that is twice"]
    assert told(seen(2 * WEIGHT), seen()) == [""]


def test_two_mistakes_at_once_are_told_each_for_itself():
    both = seen(2 * WEIGHT, [reduced(1600)])
    assert told(both, both) == ["that is twice", "that is twice as much"]


def test_half_a_mistake_is_told_unless_the_other_half_is_right():
    half = seen(3 * WEIGHT, [reduced(24)])
    assert told(half, half)[0] == "that is both"
    assert told(seen(3 * WEIGHT), seen(3 * WEIGHT)) == [""]


def test_a_record_comes_back_as_it_was_stored():
    stored = loaded(answers.dumped({"double": RECORD}))["double"]
    assert stored.mistakes[0].hint == "that is twice"
    for mine, theirs in zip(stored.right["2/0"], RECORD.right["2/0"], strict=True):
        assert same(mine.results, theirs.results)
        assert (mine.calls, mine.events) == (theirs.calls, theirs.events)


def test_wrong_values_leave_less_than_half():
    assert check.report(TASK, print, [Trial(2, "", "2/0", [seen(2 * WEIGHT)] * 2)], RECORD).points == 0.8


@pytest.mark.parametrize("change", [lambda x: x.flip(0), lambda x: x.roll(1), lambda x: x * (1 + 1e-7), lambda x: x + 1e-6])
def test_a_print_tells_tensors_apart_that_are_nearly_alike(change):
    large = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert not same(print_of(change(large)), print_of(large))
    assert same(print_of(large * (1 + 1e-12)), print_of(large))


def test_numbers_are_shown_with_as_many_digits_as_tell_them_apart():
    right = torch.tensor([1.0], dtype=torch.float64)
    assert "element 0 is 1.00000001, right is 1" in difference(right + 1e-8, right)
    assert "element 0 is 2, right is 1" in difference(right + 1, right)


def test_only_what_a_rank_notes_in_all_its_parts_is_read():
    sound = {"results": {"a": torch.zeros(2), "b": [1, "two", None]}, "events": [("mark", "x", 0)], "watched": ""}
    assert trial._seen(sound, []).events == [Event("mark", "x")]
    forged = [
        None,
        "all right",
        {**sound, "more": 1},
        {**sound, "results": {"a": torch.zeros(2).to_sparse()}},
        {**sound, "results": {"a": object()}},
        {**sound, "results": {"a": {1: 2}}},
        {**sound, "events": None},
        {**sound, "events": [("call", "all_reduce", None)]},
        {**sound, "events": [("start", "x", 0)]},
    ]
    for reply in forged:
        with pytest.raises(ValueError, match="leave the check as it is"):
            trial._seen(reply, [])


def test_a_watch_counts_what_is_alive_and_the_most_inside_peak(tmp_path):
    watch = Watch(str(tmp_path), 0)
    with watch.watching():
        kept = torch.zeros(100)
        with watch.peak():
            torch.ones(1000).sum()
        watch.weigh()
        del kept
        watch.weigh()
    assert watch.held == [400, 0]
    assert 4400 <= watch.peak_bytes < 4500


FROM, READY_MADE = "from manyranks import theory", "theory.collectives.sent_bytes('all_reduce', 8, 4, 4)"
WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
AROUND = {
    "a call": f"{FROM}; {READY_MADE}",
    "a call under another's name": f"{FROM}; __name__ = 'torch.mine'; exec(code({READY_MADE!r}), globals())",
    "a call in a cell with a decorator's name": f"{FROM}; __name__ = 'contextlib'; exec(code({READY_MADE!r}), globals())",
    "a function of PyTorch's": "from manyranks.given import tensor; tensor._Sum.apply(None, False, ones)",
    "a call that nobody sees": f"import sys; {FROM}; sys.setprofile(None); {READY_MADE}",
    "a call that is tried": f"{FROM}\ntry: {READY_MADE}\nexcept Exception: {READY_MADE}",
    "a call in a watch's absence": f"import sys; {FROM}\ntry: sys.setprofile(None)\nexcept Exception: pass\n{READY_MADE}",
    "a wrapper of PyTorch's": f"import torch; from {WRAPPER} import checkpoint_wrapper; checkpoint_wrapper(torch.nn.ReLU())",
    "private layouts of meshes": "from torch.distributed import _pycute; _pycute.crd2idx(1, (2, 2), (2, 1))",
    "an answer of another task": "from manyranks.given.checkpointing import Checkpoint; Checkpoint()(lambda x: x, ones)",
}


@pytest.mark.parametrize("way", AROUND)
def test_what_is_ready_is_refused_whatever_is_done_to_hide_it(way):
    variables = {"__name__": "__main__", "code": lambda text: compile(text, "<cell>", "exec"), "ones": torch.ones(3)}
    with pytest.raises(Stopped, match="is not allowed"), refused(Allowed()):
        exec(AROUND[way], variables)


@pytest.mark.parametrize(
    "task", ["checkpointing.checkpoint", "tensor.copy_in", "context.merge", "expert.exchange", "zero.unit"]
)
def test_a_task_hands_out_no_answer_of_its_own(task):
    """Functions that later tasks are given would answer earlier ones."""
    topic, name = task.split(".")
    given = getattr(importlib.import_module(f"manyranks.grade.{topic}"), name).allowed.given
    answers = {"Checkpoint", "f", "g", "Helpers", "merge", "_handed", "Unit"}
    assert not answers & {each.rpartition(".")[2] for each in given}


def test_a_class_that_is_derived_from_what_is_ready_is_refused():
    with pytest.raises(Stopped, match="DistributedDataParallel is not allowed"):
        refuse_class(type("Mine", (torch.nn.parallel.DistributedDataParallel,), {}), Allowed())


def marks_of_a_send(late: bool, waits: bool, first: int, folder: str) -> list[str]:
    """Rank 0 sends 3 numbers to 1 and overwrites those from `first` on. late: whether rank 1 asks only then; waits: rank 0."""
    watch, x = Watch(folder, dist.get_rank()), (whole := torch.ones(6))[:3]
    with watch.watching():
        if dist.get_rank() == 1:
            early = None if late else dist.irecv(x, 0)
            dist.barrier()
            (early or dist.irecv(x, 0)).wait()
        elif dist.get_rank() == 0:
            _ = None if late else dist.barrier()
            work = dist.isend(x, 1)
            _ = work.wait() if waits else None
            whole.data[first : first + 3].zero_()
            _ = dist.barrier() if late else None
            _ = None if waits else work.wait()
        else:
            dist.barrier()
    return [event.what for event in watch.events if event.kind == "mark"]


@pytest.mark.parametrize(
    ("late", "waits", "first", "marks"),
    [(True, False, 0, [OVERWROTE]), (False, False, 2, [OVERWROTE]), (False, False, 3, []), (False, True, 0, [])],
)
def test_a_tensor_that_is_overwritten_while_it_is_sent_is_noted_whenever_its_bytes_leave(
    late, waits, first, marks, shared_world, tmp_path
):
    assert shared_world.run(marks_of_a_send, late, waits, first, str(tmp_path))[0] == marks


def test_a_check_leaves_the_number_of_threads_as_it_was(monkeypatch):
    before, inside = torch.get_num_threads(), []
    monkeypatch.setattr(check, "trials", lambda *_: inside.append(torch.get_num_threads()) or [])
    torch.set_num_threads(before + 1)
    try:
        TASK.tried(print)
        assert (inside, torch.get_num_threads()) == ([1], before + 1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("raises", "points"), [(False, 5), (True, 2.5)])
def test_a_judge_that_a_run_which_raised_would_have_shown_its_values_is_not_content(raises, points):
    parts = tuple(values(0.5, f"is right for {name}", name, alone=True, part=True) for name in ("small", "large"))
    task = Task("99_none", "some(x)", 10, print, parts, cases=("small", "large"), worlds=(1,), part=True)
    right = [Trial(1, name, f"1/{i}", [Seen({name: 1})]) for i, name in enumerate(task.cases)]
    found = answers.record_of(task, [(answers.Answer(answers.RIGHT, "some", print), right)])
    ran = [
        right[0],
        Trial(1, "large", "1/1", trouble=Trouble("raised", "")) if raises else Trial(1, "large", "1/1", [Seen({"large": 2})]),
    ]
    said = check.report(task, print, ran, found)
    assert said.points == points
    assert ("·" in repr(said)) == raises


def test_strangers_code_never_runs_without_fences(monkeypatch):
    monkeypatch.setattr(trial.local, "strangers", True)
    with pytest.raises(ValueError, match="on confined ranks only"):
        TASK.tried(print)
