"""What `tokend bench` chaos, soak and overload refuse before they start anything."""

from pathlib import Path

import pytest

from deploy import cli


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["chaos", "--minutes", "0"], "--minutes"),
        (["chaos", "--kills", "none"], "--kills"),
        (["chaos", "--hours", "1"], "--hours"),
        (["soak", "--requests", "-5"], "--requests"),
        (["soak", "--minutes", "inf"], "--minutes"),
        (["soak", "--plot", "/nowhere/soak.html"], "/nowhere/soak.html"),
        (["soak", "--json", "/nowhere/soak.json"], "/nowhere/soak.json"),
        (["chaos", "--json", "/nowhere/chaos.json"], "/nowhere/chaos.json"),
        (["overload", "--json", "/nowhere/overload.json"], "/nowhere/overload.json"),
        (["overload", "--hours", "1"], "--hours"),
        (["null", "--hots", "x"], "--hots"),
    ],
)
def test_a_word_that_is_wrong_is_one_line_and_status_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tokend: ")
    assert expected in line


def test_a_file_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    """It is looked at before the run, and only a run that comes to an end replaces it."""
    plot = tmp_path / "soak.html"
    plot.write_text("the last one")
    assert cli.main(["bench", "soak", "--plot", str(plot), "--every", "never"]) == 2
    assert plot.read_text() == "the last one"


@pytest.mark.parametrize("name", [each for each in cli._BENCHES if each != "null"])
def test_every_measurement_can_write_its_figures(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", name, "--help"])
    assert caught.value.code == 0
    assert "--json FILE" in capsys.readouterr().out
