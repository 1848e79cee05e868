"""``ringprune bench wire``: its rows, and that it runs as a command."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from ringprune import wire
from ringprune.__main__ import main
from ringprune.bench import wire as bench_wire
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


def test_values_are_coded_as_they_were_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding overwrote them, and what was timed from then on was a book of 16 numbers, which takes less."""
    drawn: list[torch.Tensor] = []
    encode = wire.ValueCode.encode

    def noted(code: wire.ValueCode, values: torch.Tensor, *rest: Any) -> torch.Tensor:
        drawn.append(values.clone())
        return encode(code, values, *rest)

    monkeypatch.setattr(wire.ValueCode, "encode", noted)
    found = [row for row in rows(1000) if row["what"] == "values"]
    each = len(drawn) // len(found)
    assert each > 2
    assert all(torch.equal(drawn[i], drawn[i - i % each]) for i in range(len(drawn)))


@pytest.mark.parametrize("after", [0, 2])
def test_what_was_measured_before_an_interrupt_is_kept(
    after: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured = bench_wire.rows

    def interrupted(divide: int) -> Iterator[dict[str, Any]]:
        yield from islice(measured(10 * divide), after)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_wire, "rows", interrupted)
    (earlier := tmp_path / "rows.json").write_text('"before"')
    assert main(["bench", "wire", "--quick", "--json", str(earlier)]) == 130
    found = json.loads(earlier.read_text())
    assert found == "before" if not after else len(found) == after
    assert "stopped" in capsys.readouterr().err


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
