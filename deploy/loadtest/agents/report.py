"""The grid's figures as tables and as JSON, and whether it shows what pins promise."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Final

from rich.table import Table

from deploy.loadtest.agents.grid import Grid
from deploy.loadtest.agents.machines import Machine
from deploy.loadtest.agents.real import RealGrid
from deploy.loadtest.agents.rows import Cell, Measured
from proto.codec import to_json
from proto.replay import StepModel

PRESSED: Final = (50, 90)
CALM_POOL: Final = 100
FASTER: Final = 1.5
SLOWER: Final = 1.02
"""Targets: the rule's mean job so many times as fast as fcfs's with half the pool at 90 % of the
capacity; and without pressure at most 2 % longer."""


def document(grid: Grid | RealGrid, measured: Sequence[Measured], cells: Sequence[Cell]) -> str:
    """All settings and all cells, a seed each, units in the names."""
    if isinstance(grid, RealGrid):
        command, settings = "tokend bench agents --real", _plain(grid)
    else:
        command, settings = "tokend bench agents", _plain(grid, machine=_plain(grid.machine))
    found = {
        "command": command,
        "grid": settings,
        "measured": [_plain(each) for each in measured],
        "cells": [_plain(each) for each in cells],
    }
    return json.dumps(found, indent=1) + "\n"


def measured_table(grid: Grid | RealGrid, measured: Sequence[Measured]) -> Table:
    table = Table(title=f"what the cells are relative to; {grid.num_jobs} jobs a seed")
    titles = ("seed", "capacity, jobs/s", "working set, blocks", "mean", "requests", "mean job, s")
    for title in titles:
        table.add_column(title, justify="right")
    for each in measured:
        table.add_row(
            str(each.seed),
            f"{each.capacity_jobs_per_s:.3f}",
            str(each.working_set_blocks),
            f"{each.working_set_mean_blocks:.0f}",
            str(each.num_requests),
            f"{each.unpressed_job_s_mean:.1f}",
        )
    table.caption = "mean job: with a pool that holds everything, at 90 % of the capacity"
    model = measured[0].step_model
    if model is not None:
        table.caption += (
            f"; a step takes {model.base_ms:.4g} ms + {model.per_token_ms:.4g} a token + "
            f"{model.per_row_ms:.4g} a sequence + {model.per_context_ms:.4g} a token of context"
        )
    return table


def measured_line(measured: Measured) -> str:
    """Before its cells."""
    return (
        f"seed {measured.seed}: capacity {measured.capacity_jobs_per_s:.3f} jobs/s, working set "
        f"{measured.working_set_blocks:,} blocks, mean job {measured.unpressed_job_s_mean:.1f} s"
    )


def cell_line(cell: Cell) -> str:
    """One that has just ended, before others are there to compare it with."""
    failed = f", {cell.num_failed} jobs failed" if cell.num_failed else ""
    return (
        f"seed {cell.seed}, pool {cell.pool_percent} %, arrivals {cell.rate_percent} %, "
        f"{cell.variant}: mean {cell.job_s_mean:.1f} s, p99 {cell.job_s_p99:.0f} s, "
        f"found {cell.found_percent:.1f} %{failed}"
    )


def table(cells: Sequence[Cell]) -> Table:
    """A row a cell and policy: means over seeds, and the range of what is compared."""
    made = Table(title="job completion, s; ratios: fcfs by this one (range over seeds)")
    for number, title in enumerate(_titles(cells)):
        made.add_column(title, justify="left" if number < _NUM_NAMES else "right")
    before: list[str] = []
    for row in _rows(cells):
        if before and before[:2] != row[:2]:
            made.add_section()
        before = row
        made.add_row(*row)
    return made


def markdown(cells: Sequence[Cell]) -> Iterator[str]:
    """The lines of the same table in a document."""
    titles = _titles(cells)
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in _rows(cells):
        yield f"| {' | '.join(row)} |"


_NUM_NAMES: Final = 3
"""Columns that say which cell it is; the others are figures."""


def _titles(cells: Sequence[Cell]) -> list[str]:
    titles = ["pool", "arrivals", "policy", "mean", "p99", "ratio of means", "of p99", "found"]
    titles += ["preempted", "pins taken / hit / expired / unpinned"]
    if _has_others(cells):
        titles.append("others: mean, p99")
    if _has_failed(cells):
        titles.append("failed jobs")
    return titles


def _rows(cells: Sequence[Cell]) -> Iterator[list[str]]:
    for (pool, rate, name), group in grouped(cells):
        pins = ("pins_taken", "pins_hit", "pins_expired", "pins_unpinned")
        row = [
            f"{pool} %",
            f"{rate} %",
            name,
            f"{_mean(group, 'job_s_mean'):.1f}",
            f"{_mean(group, 'job_s_p99'):.0f}",
            _range(group, "ratio_mean"),
            _range(group, "ratio_p99"),
            f"{_mean(group, 'found_percent'):.1f} %",
            f"{_mean(group, 'preemptions'):.0f}",
            " / ".join(f"{_mean(group, each):.0f}" for each in pins),
        ]
        if _has_others(cells):
            row.append(f"{_mean(group, 'other_s_mean'):.1f}, {_mean(group, 'other_s_p99'):.0f}")
        if _has_failed(cells):
            row.append(str(sum(each.num_failed for each in group)))
        yield row


def _has_failed(cells: Sequence[Cell]) -> bool:
    return any(each.num_failed for each in cells)


def _has_others(cells: Sequence[Cell]) -> bool:
    return any(each.other_s_mean for each in cells)


def verdicts(cells: Sequence[Cell]) -> Iterator[str]:
    """The targets, where the grid has their cells."""
    for (pool, rate, name), group in grouped(cells):
        ratios = [each.ratio_mean for each in group if each.ratio_mean is not None]
        if name != "rule" or not ratios:
            continue
        worst = min(ratios)
        where = f"{pool} % pool, {rate} % arrivals"
        compared = [each for each in cells if each.pool_and_rate == (pool, rate)]
        if _has_failed(compared):
            num_failed = sum(each.num_failed for each in compared)
            yield f"{where}: {num_failed} jobs failed, so nothing is compared"
            continue
        if (pool, rate) == PRESSED:
            kept = "kept" if worst >= FASTER else "MISSED"
            yield f"{where}: {worst:.2f} x fcfs or better; 1.5 x: {kept}"
        if pool == CALM_POOL:
            kept = "kept" if 1 / worst <= SLOWER else "MISSED"
            percent = 100 / worst - 100
            yield f"{where}: {percent:+.1f} % at worst beside fcfs; at most +2 %: {kept}"


def grouped(cells: Sequence[Cell]) -> Iterator[tuple[tuple[int, int, str], list[Cell]]]:
    """Over the seeds, in the order of the grid."""
    groups: dict[tuple[int, int, str], list[Cell]] = {}
    for each in cells:
        groups.setdefault((each.pool_percent, each.rate_percent, each.variant), []).append(each)
    yield from groups.items()


def _plain(
    row: Grid | RealGrid | Machine | Measured | Cell, **instead: object
) -> dict[str, object]:
    """The fields of a row; a step model is an object in it."""
    found = {each.name: getattr(row, each.name) for each in fields(row)} | instead
    model = found.get("step_model")
    if isinstance(model, StepModel):
        found["step_model"] = json.loads(to_json(model))
    return found


def _mean(group: Sequence[Cell], name: str) -> float:
    return statistics.fmean(getattr(each, name) for each in group)


def _range(group: Sequence[Cell], name: str) -> str:
    values = [getattr(each, name) for each in group if getattr(each, name) is not None]
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}-{max(values):.2f})"
