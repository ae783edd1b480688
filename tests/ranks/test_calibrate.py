"""python -m manyranks.calibrate: measures on real ranks, and leaves a cluster that can be read and used."""

import itertools

import pytest

from manyranks import calibrate
from manyranks.calibrate import SIDES, SIZES, Round
from manyranks.theory import Plan, clusters, models, step

QUIET = Round([9e10 for _ in SIDES], 2e10, [1e-4 + size / 2e9 for size in SIZES], waited=0.01)


def slower(by: float) -> Round:
    return Round([each / by for each in QUIET.products], QUIET.copy / by, [each * by for each in QUIET.seconds], QUIET.waited)


def test_every_rank_measures_everything_in_every_round(monkeypatch):
    monkeypatch.setattr(calibrate, "ROUNDS", 2)
    monkeypatch.setattr(calibrate, "SIDES", (64, 128))
    monkeypatch.setattr(calibrate, "SIZES", [2**12, 2**22])
    of_ranks = calibrate._rounds(3)
    assert [len(rounds) for rounds in of_ranks] == [calibrate.ROUNDS] * 3
    for each in itertools.chain(*of_ranks):
        assert all(1e6 < rate < 1e14 for rate in (*each.products, each.copy))
        assert len(each.products) == len(each.seconds) == 2
        assert min(each.seconds) > 0
        assert each.waited < 1


def test_the_command_writes_a_cluster_of_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "_rounds", lambda ranks: [[QUIET] * 5] * ranks)
    path = tmp_path / "mine.json"
    calibrate.main(["--ranks", "3", "--out", str(path)])
    said = capsys.readouterr().out
    assert "memory                   20 GB/s     (20 to 20 in 5 rounds)" in said
    assert "between 3 ranks, each on one core" in said
    assert f'theory.clusters["{path}"]' in said
    cluster = clusters[str(path)]
    assert cluster.name == "mine"
    assert cluster.accelerator.flops * cluster.accelerator.matmul_fraction == pytest.approx(9e10)
    assert step.estimate(models["gpt2"], Plan(dp=2), cluster).seconds > 0


@pytest.mark.parametrize("arguments", [["--ranks", "1"], ["--ranks", "0"], ["--out", "no/such/folder/mine.json"]])
def test_what_cannot_be_ends_with_a_sentence(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        calibrate.main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rounds", "others", "said"),
    [
        ([QUIET] * 5, [QUIET] * 5, ""),
        ([slower(by) for by in (1, 1.3, 1, 1.2, 1.1)], [QUIET] * 5, ""),
        ([QUIET] * 5, [QUIET] * 4 + [QUIET._replace(waited=0.9)], ""),  # one moment, which no median shows
        ([slower(10)._replace(waited=0.9)] * 5, [QUIET] * 5, "a rank waited for a processor 90% of the time"),  # evenly
        ([QUIET] * 5, [QUIET._replace(waited=0.3)] * 5, "a rank waited for a processor 30% of the time"),
        (
            [QUIET, slower(3), QUIET, slower(2), QUIET],  # by what the system doesn't count, such as its own host
            [QUIET] * 5,
            "products: 0.03 to 0.09 TFLOP/s; memory: 6.67 to 20 GB/s; largest all-reduce: 0.665 to 1.99 GB/s",
        ),
    ],
    ids=["quiet", "a little noise", "one bad moment", "evenly slow", "the other rank", "uneven"],
)
def test_a_busy_machine_shows_in_its_waiting_or_in_its_spread(rounds, others, said):
    assert calibrate.doubts([rounds, others]) == said


def test_the_rates_of_a_busy_machine_are_written_only_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "_rounds", lambda ranks: [[slower(10)._replace(waited=0.9)] * 5] * ranks)
    path = tmp_path / "mine.json"
    with pytest.raises(SystemExit) as ended:
        calibrate.main(["--out", str(path)])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert "products              0.009 TFLOP/s  (0.009 to 0.009 in 5 rounds)" in told.out
    assert "a rank waited for a processor 90% of the time.\nNothing was written. Close other programs" in told.err
    assert not path.exists()
    calibrate.main(["--out", str(path), "--anyway"])
    assert "Not to be trusted: a rank waited for a processor 90% of the time.\nWritten:" in capsys.readouterr().out
    assert clusters[str(path)].accelerator.flops == pytest.approx(9e9)


def test_every_rate_is_the_median_of_its_rounds(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "_rounds", lambda ranks: [[QUIET, slower(1.9), QUIET]] * ranks)
    calibrate.main(["--out", str(tmp_path / "mine.json")])
    assert clusters[str(tmp_path / "mine.json")].accelerator.flops == pytest.approx(9e10)
