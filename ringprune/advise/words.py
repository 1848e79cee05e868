"""An answer for people: one line in words, the table, and what both rest on."""

from collections.abc import Callable, Iterator, Sequence

from ringprune.advise.rows import DENSE, Row
from ringprune.prediction import MARGIN, best
from ringprune.readers import written_rate

__all__ = ["COLUMNS", "LEGEND", "mixtures", "sentence"]

NEVER, EVERYWHERE, NOTHING = "never", "always", "-"


def _pays(row: Row) -> str:
    """From which rate on it does not."""
    if row["method"] == DENSE:
        return NOTHING
    if row["pays_everywhere"]:
        return EVERYWHERE
    return written_rate(row["pays_below"]) if row["pays_below"] else NEVER


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("method", lambda row: str(row["method"])),
    ("", lambda row: "<- best" if row["best"] else ""),
    ("step ms", lambda row: f"{1e3 * row['seconds']:,.1f}"),
    ("over compute", lambda row: f"{1e3 * row['exposed_seconds']:+,.1f}"),
    ("local", lambda row: f"{1e3 * row['local_seconds']:,.1f}"),
    ("network", lambda row: f"{1e3 * row['network_seconds']:,.1f}"),
    ("sent MB", lambda row: f"{row['bytes_per_rank'] / 1e6:,.2f}"),
    ("x dense", lambda row: f"{row['speedup']:.2f}"),
    ("pays below", _pays),
)

LEGEND = f"""\
step ms     forward, backward and exchange, overlapped as the wrapper does; over compute: what the exchange adds
local       milliseconds of the processor: select, code, copy
network     messages one after the other, partly behind the backward pass
sent        by each rank, 10^6 bytes, with indices and headers; x dense: steps in the same time against dense in float32
pays below  the rate of the links below which it is faster than dense by more than {100 * MARGIN:g} %
best        the first that none other beats by more than {100 * MARGIN:g} %: what is above leaves less out
dense, also in 16 bits, is RingPrune's own: coded on the host, where Horovod's fp16 is a cast on the device"""


def sentence(rows: Sequence[Row], rate: str) -> str:
    """The answer in words."""
    dense, chosen = (next(row for row in rows if test(row)) for test in (_is_dense, _is_best))
    if chosen["ranks"] == 1:
        return "One rank sends nothing. Leave compression off."
    if len(rows) == 1:
        return f"Only {dense['method']} was asked for, and nothing to compare it with: leave --methods out for all."
    link = "Over links without limit" if rate == "unlimited" else f"At {rate}"
    where = f"{link} with {chosen['ranks']} ranks"
    took = f"{1e3 * dense['seconds']:,.0f} ms a step"
    partly = _partly(rows, dense, chosen)
    if chosen is dense:
        off = f"Only in part it pays: {partly}" if partly else "Leave compression off."
        return f"{where} dense is as good as any method alone ({took}). {off} {_limit(rows)}"
    fits = f"{chosen['method']} is {chosen['speedup']:.2f} times as fast as dense"
    better = f" Better in part: {partly}" if partly else ""
    return f"{where} {fits} ({1e3 * chosen['seconds']:,.0f} against {took}).{better} {_limit(rows)}"


def mixtures(rows: Sequence[Row]) -> Iterator[str]:
    """Where some buckets of a method are better sent whole."""
    for row in rows:
        if 0 < row["buckets_better_dense"] < row["packed_buckets"]:
            yield (
                f"{row['method']}: {row['buckets_better_dense']} of {row['packed_buckets']} packed buckets are better "
                f"sent whole: {1e3 * row['mixed_seconds']:,.1f} ms"
            )


def _partly(rows: Sequence[Row], dense: Row, chosen: Row) -> str:
    """What is faster where some buckets are sent whole; nothing where that is not by the margin."""
    mixed = {row["method"]: row for row in rows if 0 < row["buckets_better_dense"] < row["packed_buckets"]}
    name = best({DENSE: dense["seconds"]} | {method: row["mixed_seconds"] for method, row in mixed.items()})
    if name == DENSE or (1 + MARGIN) * mixed[name]["mixed_seconds"] >= chosen["seconds"]:
        return ""
    row = mixed[name]
    whole = f"{row['buckets_better_dense']} of {row['packed_buckets']} buckets sent whole"
    return f'{name} with {whole} takes {1e3 * row["mixed_seconds"]:,.0f} ms, as policy="auto" arranges it.'


def _limit(rows: Sequence[Row]) -> str:
    """The rate from which on none of them pays."""
    others = [row for row in rows if not _is_dense(row)]
    if any(row["pays_everywhere"] for row in others):
        names = ", ".join(row["method"] for row in others if row["pays_everywhere"])
        return f"At any rate {names} would pay."
    limit = max(others, key=lambda row: row["pays_below"], default=None)
    if limit is None or not limit["pays_below"]:
        return "None of the other methods pays at any rate."
    return f"From {written_rate(limit['pays_below'])} on no method pays alone ({limit['method']} does the longest)."


def _is_dense(row: Row) -> bool:
    return bool(row["method"] == DENSE)


def _is_best(row: Row) -> bool:
    return bool(row["best"])
