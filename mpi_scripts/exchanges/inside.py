"""The comparison inside a job: every rank measures one method after the other, rank 0 keeps the rows."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator

from models import shapes

from exchanges.errors import CannotRun
from exchanges.job import Job
from exchanges.measure import measure
from exchanges.methods import Method, named
from exchanges.options import choice_of
from exchanges.rows import AS_IT_IS, Row, facts, row_of
from ringprune.errors import ConfigurationError, DependencyError

__all__ = ["rows"]


def rows(options: argparse.Namespace, job: Job, say: Callable[[str], None]) -> Iterator[Row]:
    """Measure every model with every method that can run in this job; all ranks together.

    Raises:
        CannotRun: no method can.
    """
    if job.size < 2:
        raise CannotRun("one rank alone sends nothing: mpirun -np 2 or more")
    (rate,) = options.rates or [AS_IT_IS]
    methods = list(_fitting(options, job, say))
    if not methods:
        raise CannotRun("none of the methods asked for can run in this job")
    left_out: list[str] = []
    for model in options.models:
        parameters = shapes(model)
        for method in methods:
            choice = choice_of(options, model, method.name, rate)
            load = os.getloadavg()[0]
            try:
                seen = measure(job, method, choice, parameters, _ticker(job, f"{model} {method.name}"))
            except (CannotRun, ConfigurationError, DependencyError) as error:  # on all ranks alike
                say(f"skipped: {method.name}: {error}")
                left_out.append(str(error))
                continue
            numels = [math.prod(shape) for shape in parameters.values()]
            row = row_of(choice, method.communicator(choice.communicator), numels, seen)
            yield row | {"emulated": False} | facts(job.library, load)
    if len(left_out) == len(methods) * len(options.models):
        raise CannotRun(left_out[0])


def _fitting(options: argparse.Namespace, job: Job, say: Callable[[str], None]) -> Iterator[Method]:
    for method in named(options.methods):
        try:
            method.check_job(job, choice_of(options, options.models[0], method.name, AS_IT_IS))
        except CannotRun as error:
            say(f"skipped: {error}")
        else:
            yield method


def _ticker(job: Job, what: str) -> Callable[[int, int], None]:
    """Says on rank 0 how far it is."""

    def tick(step: int, steps: int) -> None:
        if job.rank == 0:
            print(f"{what}: step {step}/{steps}", file=sys.stderr, flush=True)

    return tick
