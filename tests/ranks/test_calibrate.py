"""python -m manyranks.calibrate: measures on real ranks, and leaves a cluster that can be read and used."""

import pytest

from manyranks import calibrate
from manyranks.theory import Plan, clusters, models, step


def test_the_command_writes_a_cluster_of_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "SIDES", (64, 128))
    monkeypatch.setattr(calibrate, "SIZES", [2**12, 2**22])
    path = tmp_path / "mine.json"
    calibrate.main(["--ranks", "3", "--out", str(path)])
    said = capsys.readouterr().out
    assert "between 3 ranks, each on one core" in said
    assert f'theory.clusters["{path}"]' in said
    cluster = clusters[str(path)]
    assert cluster.name == "mine"
    assert 1e8 < cluster.accelerator.flops * cluster.accelerator.matmul_fraction < 1e14
    assert step.estimate(models["gpt2"], Plan(dp=2), cluster).seconds > 0


@pytest.mark.parametrize("arguments", [["--ranks", "1"], ["--ranks", "0"], ["--out", "no/such/folder/mine.json"]])
def test_what_cannot_be_ends_with_a_sentence(arguments, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "SIDES", (64,))
    monkeypatch.setattr(calibrate, "SIZES", [2**12, 2**22])
    with pytest.raises(SystemExit) as ended:
        calibrate.main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err
