"""``ringprune bench wire``: its rows, and that it runs as a command."""

import json

import pytest

from ringprune import wire
from ringprune.__main__ import main
from ringprune.bench.wire import rows


def test_rows_cover_every_format_and_tell_the_bits_of_the_formula() -> None:
    found = list(rows(1000))
    assert [row["format"] for row in found if row["what"] == "values"] == list(wire.VALUE_FORMATS[1:])
    for row in found:
        assert row["encode_ms"] > 0 and row["decode_ms"] > 0 and 0 <= row["kept"] <= row["of"]
        assert (row["ratio_to_fused"] is None) == (row["what"] == "indices")
        if row["what"] == "indices":
            size = wire.index_code(row["count"], row["n"], row["format"]).size
            assert row["bits_per_item"] == pytest.approx(8 * size / row["count"])


def test_the_command_writes_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "wire", "--quick", "--json", "-"]) == 0
    assert {row["what"] for row in json.loads(capsys.readouterr().out)} == {"indices", "values"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--threads", "0"], "'0': a whole number of at least 1"),
        (["--threads", "-1"], "'-1': a whole number of at least 1"),
        (["--json", "missing/rows.json"], "a file in a folder that exists"),
    ],
)
def test_wrong_arguments_are_named_before_measuring(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "wire", *arguments])
    assert complaint in capsys.readouterr().err
