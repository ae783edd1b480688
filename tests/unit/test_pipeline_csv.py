"""The CSV form: what PyTorch writes we read, what we write PyTorch reads, and both mean the same table."""

import re
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.actions import Action, Pair
from manyranks.parallel.pipeline.csv_form import from_csv, from_rows, to_csv
from manyranks.parallel.pipeline.program import Times, bubble, program
from manyranks.parallel.pipeline.verify import peaks, verify
from manyranks.timeline import replay

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in sorted({1, 2, p, 2 * p, 2 * p + 1, 4 * p})]
TORCH = {
    "ScheduleGPipe": schedules.one_stage_a_rank,
    "Schedule1F1B": schedules.one_stage_a_rank,
    "ScheduleInterleaved1F1B": lambda p: schedules.looped(p, 2),
    "ScheduleInterleavedZeroBubble": lambda p: schedules.looped(p, 2),
    "ScheduleZBVZeroBubble": schedules.v_shape,
    "ScheduleDualPipeV": schedules.v_shape,
}


def local_stages(placement):
    """Of rank 0, as far as PyTorch's schedules look at them when no module is run."""
    p = max(placement) + 1
    common = {"group_size": p, "group_rank": 0, "num_stages": len(placement), "submod": None}
    last = len(placement) - 1
    own = [stage for stage, rank in enumerate(placement) if rank == 0]
    return [SimpleNamespace(stage_index=s, is_first=s == 0, is_last=s == last, **common) for s in own]


def torch_rows(name, p, m):
    """The pipeline_order of PyTorch's schedule, or None where it does not allow these sizes."""
    kind = getattr(torch_schedules, name)
    stages = local_stages(TORCH[name](p))
    if m < p and name == "Schedule1F1B":
        return None  # its step() refuses it
    try:
        one = issubclass(kind, torch_schedules.PipelineScheduleSingle)
        order = kind(stages[0] if one else stages, m).pipeline_order
    except ValueError:
        return None
    return [order[rank] for rank in range(p)]


def shifted(rows):
    """With the forwards of a stage numbered from 0: Schedule1F1B's table starts the last stage's at 1."""
    text = [[str(cell) for cell in row if cell is not None] for row in rows]
    last = [f"{len(rows) - 1}F{int(cell.partition('F')[2]) - 1}" if "F" in cell else cell for cell in text[-1]]
    return [*text[:-1], last]


@pytest.mark.parametrize("name", [name for name in TORCH if name != "Schedule1F1B"])
def test_pytorch_s_own_tables_are_read_and_can_run(name):
    read = 0
    for p, m in SIZES:
        if rows := torch_rows(name, p, m):
            schedule = from_rows(rows, name)
            verify(schedule)
            assert (schedule.placement, schedule.microbatches, schedule.name) == (TORCH[name](p), m, name)
            read += 1
    assert read >= 12


def test_pytorch_s_1f1b_table_counts_the_last_stage_s_forwards_from_1_and_is_ours_otherwise():
    """Its runtime does not use the table. If this fails, PyTorch may have mended it: drop `shifted`."""
    for p, m in SIZES:
        if rows := torch_rows("Schedule1F1B", p, m):
            assert from_rows(shifted(rows)).ranks == schedules.one_f_one_b(p, m).ranks
            with pytest.raises(ValueError, match=f"F{m} of stage 0 is missing|F0 of stage 0 is missing"):
                verify(from_rows(rows))


def test_pytorch_s_tables_that_have_a_twin_here_are_the_same():
    for p, m in SIZES:
        if m >= 2 * p:
            assert from_rows(torch_rows("ScheduleDualPipeV", p, m)).ranks == schedules.dualpipe_v(p, m).ranks
        if m % p == 0:
            assert from_rows(torch_rows("ScheduleInterleaved1F1B", p, m)).ranks == schedules.interleaved(p, m, 2).ranks
        assert from_rows(torch_rows("ScheduleGPipe", p, m)).ranks == schedules.gpipe(p, m).ranks
        theirs, ours = from_rows(torch_rows("ScheduleZBVZeroBubble", p, m)), schedules.zb_v(p, m)
        for rank in range(p):  # their cool-down takes weight gradients by stage, ours the oldest
            without = [[a for a in table.actions(rank) if a.kind != "W"] for table in (theirs, ours)]
            assert without[0] == without[1]


def test_interleaved_zero_bubble_replays_with_the_bubble_of_zb_h1():
    table = from_rows(torch_rows("ScheduleInterleavedZeroBubble", 4, 8))
    assert bubble(replay(program(table), Times())) == 3
    assert peaks(table) == (8, 8, 8, 8)


def ours(p, m):
    yield from (make(p, m) for make in (schedules.naive, schedules.gpipe, schedules.one_f_one_b, schedules.zb_h1))
    yield from (make(p, m) for make in (schedules.zb_h2, schedules.zb_v, schedules.dualpipe_v))
    yield from (schedules.interleaved(p, m, v) for v in (1, 2, 3))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_what_is_written_is_read_back(p):
    for m in (1, 2, p, 2 * p, 2 * p + 1):
        for schedule in ours(p, m):
            assert from_csv(to_csv(schedule), schedule.name) == schedule


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_pytorch_s_runtime_loads_every_table_and_finds_the_messages(p, tmp_path):
    file = tmp_path / "schedule.csv"
    for m in (1, p, 2 * p + 1):
        for schedule in ours(p, m):
            file.write_text(to_csv(schedule), newline="")
            runtime = torch_schedules._PipelineScheduleRuntime(local_stages(schedule.placement), m)
            runtime._load_csv(str(file))
            assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))
            lowered = from_rows(runtime.pipeline_order_with_comms[rank] for rank in range(p))
            assert lowered.ranks == schedule.ranks  # with its messages left out


def test_cells_are_stage_action_and_micro_batch():
    assert to_csv(schedules.zb_h1(2, 1)) == "0F0,0I0,0W0\r\n1F0,1I0,1W0\r\n"
    rows = to_csv(schedules.dualpipe_v(1, 3)).split("\r\n")
    assert rows[0].startswith("0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,(0F2;1B1)OVERLAP_F_B")


def test_waits_messages_and_sharding_are_left_out():
    text = "0F0,,0SEND_F0,0UNSHARD,0WAIT_SEND_F0,0RECV_B0, 0B0 ,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
    text += ",1RECV_F0,1F0,1B0,1SEND_B0\n"
    schedule = from_csv(text)
    assert schedule.ranks[0] == (Action("F", 0, 0), Action("B", 0, 0))
    assert schedule.ranks == schedules.one_f_one_b(2, 1).ranks
    assert schedule.name == "imported"


def test_a_pair_is_read_in_its_order():
    schedule = from_csv("0F0,1F0,0F1,(1F1;0B1)OVERLAP_F_B")
    assert schedule.ranks[0][-1] == Pair(Action("F", 1, 1), Action("B", 0, 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0X0", "row 0, cell 1: '0X0' is no action; it must be stage, F, B, I or W"),
        ("0F0\n1F", "row 1, cell 0: '1F' is no action"),
        ("0F0,(0F1)OVERLAP_F_B", "row 0, cell 1: '(0F1)OVERLAP_F_B' is no action"),
        ("0F0,(0F1;)OVERLAP_F_B", "row 0, cell 1: '(0F1;)OVERLAP_F_B' is no action"),
        ("0F0,1F0\n1B0", "stage 1 is on rank 0 and rank 1; a stage has one rank"),
        ("0F0\n2F0", "no rank has stage 1; stages are counted from 0, without gaps"),
        ("", "there is no action in any row"),
        ("0UNSHARD\n,", "there is no action in any row"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        from_csv(text)
