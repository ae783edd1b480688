"""Pictures and widgets that ranks show, and a notebook's view of a run as it goes. Looks are the browser's tests."""

import base64
import os
import re
import socket
from pathlib import Path

import pytest

import manyranks as mr
from manyranks.world.errors import WorldError
from manyranks.world.fences.confine import Confined
from manyranks.world.notebook import live
from manyranks.world.notebook.output import Output
from manyranks.world.processes import handle
from manyranks.world.rank.shown import MARK, MOST, Shown

CELLS = {
    "start": "import manyranks as mr\n%load_ext manyranks\nworld = mr.World(2)",
    "rich": """%%ranks
from IPython.display import HTML, display as show_it
print("before", rank)
show_it(HTML(f"<b>{rank}</b>"))
print("after")
import matplotlib.pyplot as plt
_ = plt.plot([rank, 1])""",
    "last": """%%ranks 1
class Table:
    def _repr_html_(self):
        return "<table></table>"
    def __repr__(self):
        return "a table"
Table()""",
    "shy": """%%ranks 1
class Shy(Table):
    def __repr__(self):
        raise KeyError("me")
Shy()""",
    "large": """%%ranks 0
display({"text/plain": "large", "text/html": "x" * 6_000_000}, raw=True)
for _ in range(60):
    display({"text/plain": "one", "text/html": "1"}, raw=True)""",
    "run": """def draw():
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(figsize=(1, 1))
    return 1
world.run(draw)""",
    "drawn and failed": "%%ranks 0\nplt.plot([1, 2])\n1 / 0",
    "quick": "%%ranks\ndist.all_reduce(torch.ones(1_000_000))\nprint('quick', rank)",
    "slow": "%%ranks\nimport time\nfor i in range(4):\n    print(i, rank)\n    time.sleep(0.4)",
    "hang": "%%ranks\nx = torch.ones(4)\nif rank:\n    dist.all_reduce(x)\nelse:\n    dist.recv(x, 1)",
    "fails": "%%ranks\nimport time\ntime.sleep(1.5)\nif rank:\n    raise ValueError('late')",
}


STRIPS = ("slow", "hang", "fails")


@pytest.fixture(scope="module")
def outputs():
    """Outputs of each of CELLS, as a notebook keeps them."""
    import nbformat  # takes a second, in each rank that imports this file

    from tests.notebooks.execute import run

    cells = {name: nbformat.v4.new_code_cell(source) for name, source in CELLS.items()}
    notebook = nbformat.v4.new_notebook(cells=list(cells.values()))
    before = os.environ.pop("MANYRANKS_SETTINGS", None)  # "off" shows nothing that is not the same in each run
    try:
        run(notebook, Path(), allow_errors=True)
    finally:
        os.environ |= {} if before is None else {"MANYRANKS_SETTINGS": before}
    found = {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}
    # On a busy machine a short run may last a second, too, and leave what its strip left.
    return {name: found[name] if name in STRIPS else [o for o in found[name] if not of_a_strip(o)] for name in found}


def of_a_strip(output) -> bool:
    return output.get("data") == {"text/plain": ""} or "manyranks-run" in output.get("data", {}).get("text/html", "")


def texts(outputs) -> str:
    return "".join(output.get("text", "") for output in outputs if output.output_type == "stream")


def test_what_a_rank_shows_arrives_in_its_place(outputs):
    found = outputs["rich"]
    assert [output.output_type for output in found] == ["stream", "display_data"] * 4
    assert [o.text for o in found[0::2]] == [text for r in (0, 1) for text in (f"── rank {r} ──\nbefore {r}\n", "after\n")]
    assert [found[k].data["text/html"] for k in (1, 5)] == ["<b>0</b>", "<b>1</b>"]
    for k in (3, 7):
        assert found[k].data["text/plain"].startswith("<Figure size")
        assert base64.b64decode(found[k].data["image/png"]).startswith(b"\x89PNG")


def test_a_last_value_is_shown_as_a_notebook_would(outputs):
    heading, table = outputs["last"]
    assert heading.text == "── rank 1 ──\n"
    assert table.data == {"text/plain": "a table", "text/html": "<table></table>"}


def test_a_value_whose_repr_raises_is_shown_in_its_other_forms(outputs):
    shown = outputs["shy"][1].data
    assert shown == {"text/plain": "<Shy, whose __repr__ raises KeyError: 'me'>", "text/html": "<table></table>"}


def test_too_large_and_too_many_are_left_out_and_said(outputs):
    shown = [output.data for output in outputs["large"] if output.output_type == "display_data"]
    assert shown[0] == {"text/plain": "large\n[left out: text/html of 6.0 MB; at most 5 MB are shown]"}
    assert len(shown) == MOST
    assert "[the first 50 things are shown as a notebook would; the others are text]\none\n" in texts(outputs["large"])


def test_figures_of_a_function_are_shown_too(outputs):
    assert sum("image/png" in output.get("data", {}) for output in outputs["run"]) == 2


def test_what_was_drawn_before_a_failure_is_shown_with_it(outputs):
    assert [output.output_type for output in outputs["drawn and failed"]] == ["stream", "display_data", "error"]


def test_a_quick_run_is_text_alone(outputs):
    assert {output.output_type for output in outputs["quick"]} == {"stream"}


def test_a_run_that_ends_well_leaves_its_text_in_rank_order_and_no_strip(outputs):
    assert texts(outputs["slow"]) == "".join(f"── rank {r} ──\n" + "".join(f"{i} {r}\n" for i in range(4)) for r in (0, 1))
    assert all(output.data == {"text/plain": ""} for output in outputs["slow"] if output.output_type == "display_data")


def test_the_last_state_stays_as_the_picture_of_a_hang(outputs):
    strip = next(output.data for output in outputs["hang"] if output.output_type == "display_data")
    assert strip["text/plain"] == (
        "rank 0: waits in recv #0, for rank 1, cell 10, line 6\nrank 1: waits in all_reduce #0, for rank 0, cell 10, line 4"
    )
    cells = re.findall(r"<b>(rank \d)</b> … (waits in \w+ #0)<small>(for rank \d), cell 10, line \d", strip["text/html"])
    assert cells == [("rank 0", "waits in recv #0", "for rank 1"), ("rank 1", "waits in all_reduce #0", "for rank 0")]
    assert "button" not in strip["text/html"]
    assert "MB sent" not in strip["text/html"]  # that was an earlier run


def test_a_failure_in_a_notebook_says_how_to_look_at_it(outputs):
    hint = "world.debug() lets you look at the frames and variables of that moment"
    assert hint in outputs["fails"][-1].evalue
    assert hint in outputs["hang"][-1].evalue


def test_a_failure_says_in_the_strip_who_raised(outputs):
    strip = next(output.data for output in outputs["fails"] if output.output_type == "display_data")
    assert strip["text/plain"] == "rank 0: done\nrank 1: raised, ValueError"


@pytest.fixture(scope="module")
def world():
    with mr.World(2) as world:
        yield world


class Rich:
    def _repr_png_(self):
        return b"\x89PNG"

    def _repr_html_(self):
        return "<script>alert(1)</script>"

    def __repr__(self):
        return "as text"


def show_rich():
    from IPython.display import display

    print("first")
    display(Rich())
    print("last")


def test_outside_a_notebook_it_is_text(world, capsys, monkeypatch):
    monkeypatch.setattr("manyranks.world.notebook.output._FIRST_LOOK", 60.0)  # a busy machine may take a second for the import
    world.run(show_rich)
    assert capsys.readouterr().out == "".join(f"── rank {rank} ──\nfirst\nas text\nlast\n" for rank in range(2))


def test_values_whose_methods_fail_are_text(world, capsys):
    source = """
class Odd:
    def __getattr__(self, name):
        return lambda: 3 if name == "_repr_html_" else 1 / 0
    def __repr__(self):
        return "odd"
Odd()"""
    world.run_cell(source, "<cell 1>", [0])
    assert capsys.readouterr().out == "── rank 0 ──\nodd\n"


def test_only_text_and_pictures_come_from_a_confined_rank(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(Output, "_show", lambda self, key: taken.append(self._shown[key[1]].popleft().data))
    source = """
class Rich:
    _repr_png_ = lambda self: b"\\x89PNG"
    _repr_html_ = lambda self: "<script>alert(1)</script>"
    __repr__ = lambda self: "as text"
display(Rich())"""
    with mr.World(2, confined=Confined(str(tmp_path))) as world:
        world.run_cell(source, "<cell 1>")
    assert taken == [{"text/plain": "as text", "image/png": base64.b64encode(b"\x89PNG").decode()}] * 2


def test_a_confined_world_leaves_other_worlds_the_kernel_s_network(tmp_path):
    with mr.World(1, confined=Confined(str(tmp_path))), mr.World(1) as world, socket.create_server(("127.0.0.1", 0)) as here:
        world.run(lambda port: socket.create_connection(("127.0.0.1", port), timeout=10).close(), here.getsockname()[1])


def test_confined_ranks_whose_replies_drip_hold_a_run_up_no_longer_than_one_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(handle, "_WHOLE", 2.0)
    source = """
import gc, socket, struct, time
notebook = min((one for one in gc.get_objects() if isinstance(one, socket.socket)), key=lambda one: one.fileno())
notebook.sendall(struct.pack("<IQQ", 2, 500, 500))
while time.sleep(0.1) is None:
    notebook.sendall(b"x")
"""
    with mr.World(5, timeout=1.0, confined=Confined(str(tmp_path))) as world:
        with pytest.raises(WorldError):
            world.run_cell(source, "<cell 1>")
        assert 2 < world.took < 8  # each of them would take as long


def test_ipython_s_handles_and_clear_output_do_no_harm(world, capsys):
    source = """from IPython.display import clear_output, display
shown = display("one", display_id=True)
shown.update("two")
clear_output()"""
    world.run_cell(source, "<cell 1>", [0])
    assert capsys.readouterr().out == "── rank 0 ──\n'one'\n'two'\n"


def test_a_progress_bar_is_what_stands_there_last():
    assert live._overwritten("a\r 5%\r50%\nb\n100%\r") == "50%\nb\n100%"


def test_a_program_that_prints_the_mark_shows_nothing(world, capsys):
    world.run(print, f"a{MARK}b")
    assert capsys.readouterr().out == "".join(f"── rank {rank} ──\na\nb\n" for rank in range(2))


def test_text_after_a_thing_that_has_not_come_waits_for_it(capsys, tmp_path):
    output = Output(started=0.0)
    read, write = os.pipe()
    os.write(write, f"a\n{MARK}b\n".encode())
    output.read(read, "stdout", 0)
    output.show_live(now=10.0)
    assert capsys.readouterr().out == ""
    output.take(0, Shown({"text/plain": "it"}))
    output.show_live(now=20.0)
    assert capsys.readouterr().out == "── rank 0 ──\na\nit\nb\n"
    os.close(read)
    os.close(write)


def test_faults_while_ranks_print(world):
    def prints_and_dies():
        import signal

        print("x" * 100_000)
        os.kill(os.getpid(), signal.SIGKILL)

    def prints_and_raises():
        print("y" * 100_000)
        raise ValueError("in the middle")

    def prints_without_end():
        import itertools

        for k in itertools.count():
            print(k, "z" * 1000)

    with pytest.raises(mr.RankDied):
        world.run(prints_and_dies)
    with pytest.raises(mr.RankFailed, match="in the middle"):
        world.run(prints_and_raises)
    with mr.World(2, timeout=1.5) as other, pytest.raises(mr.RankHung, match=r"not over after 1\.5 s"):
        other.run(prints_without_end)
    assert world.run(int) == [0, 0]
