"""Flags that the benchmarks refuse before they start anything."""

import pytest

from deploy import cli


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["chaos", "--minutes", "0"], "--minutes"),
        (["chaos", "--kills", "none"], "--kills"),
        (["chaos", "--hours", "1"], "--hours"),
        (["chaos", "--json", "/nowhere/chaos.json"], "/nowhere/chaos.json"),
    ],
)
def test_an_invalid_argument_is_one_line_and_status_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tokend: ")
    assert expected in line


@pytest.mark.parametrize("name", cli._BENCHES)
def test_every_measurement_can_write_its_figures(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", name, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--json FILE" in text
    assert max(map(len, text.splitlines())) <= 100, "an example keeps its lines"
