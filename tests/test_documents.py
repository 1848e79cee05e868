"""The documents keep what they promise: their code runs, their links and names lead somewhere."""

import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ringprune as rp
from ringprune.report.rows import row_of
from tests.documents import DOCUMENTS, PAGES, ROOT, Block, anchors, blocks, code_spans, links, prose, undo
from tests.mpi.launch import run_job

QUICKSTART = ROOT / "docs" / "quickstart.md"
SHELL = ("sh",)
HOSTS = ("arxiv.org", "github.com", "keepachangelog.com", "semver.org", "doi.org")
FOLDERS = ("csrc", "docs", "examples", "mpi_scripts", "ringprune", "tests")
MACHINE = r"/(work|tmp|root|home|opt|usr|var|mnt)/|\.\./shared|\bwt-|localhost"
OTHER_HOST = rf"https?://(?!({'|'.join(map(re.escape, HOSTS))})/)"


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


documents = pytest.mark.parametrize("document", DOCUMENTS, ids=name)
pages = pytest.mark.parametrize("document", PAGES, ids=name)


# -- Python -----------------------------------------------------------------------------------------------------------


def stands_alone(block: Block) -> bool:
    """Whether a block is a program; the others continue the script of the quick start."""
    return "import ringprune" in block.source


def script() -> list[Block]:
    """The quick start's script: what every Horovod script has, then the optimizer and the loop."""
    return blocks(QUICKSTART, "python")[:2]


PYTHON = [block for document in DOCUMENTS for block in blocks(document, "python")]
ALONE = [block for block in PYTHON if stands_alone(block) and block != script()[0]]
PIECES = [block for block in PYTHON if not stands_alone(block) and block != script()[1]]


def place(block: Block) -> str:
    return f"{name(block.document)}:{block.line}"


@pytest.mark.ranks
@pytest.mark.parametrize("block", ALONE, ids=place)
def test_programs_run(block: Block, tmp_path: Path) -> None:
    """On two ranks where they ask for ranks, otherwise in one process."""
    arguments = [str(block.document), str(tmp_path), str(block.line)]
    if "rp.connect(" in block.source:
        run_job("tests.mpi.jobs.document", *arguments, timeout=120)
        return
    done = subprocess.run(
        [sys.executable, "-m", "tests.mpi.jobs.document", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.ranks
@pytest.mark.parametrize("document", sorted({block.document for block in PIECES}), ids=name)
def test_pieces_continue_the_quick_start(document: Path, tmp_path: Path) -> None:
    """Those that wrap the optimizer themselves continue its first block, the others the whole script."""
    pytest.importorskip("horovod")
    assert document == QUICKSTART, "pieces of other documents would need the quick start's lines"
    first, second = (block.line for block in script())
    runs = [
        f"{first},{block.line}" if "DistributedOptimizer(" in block.source else f"{first},{second},{block.line}"
        for block in PIECES
    ]
    run_job("tests.mpi.jobs.document", str(document), str(tmp_path), *runs, launcher="horovodrun", timeout=240)


DIFFS = [block for document in DOCUMENTS for block in blocks(document, "diff")]


@pytest.mark.ranks
def test_migration_is_the_lines_of_the_diff(tmp_path: Path) -> None:
    """Without them the script of the quick start is one of plain Horovod, and runs."""
    pytest.importorskip("horovod")
    assert len({diff.source for diff in DIFFS}) == 1, "all documents show the same lines"
    assert sum(line.startswith("+") for line in DIFFS[0].source.splitlines()) == 3, "it promises three lines"
    before = undo(DIFFS[0].source, "".join(block.source for block in script()))
    assert "ringprune" not in before
    assert "rp." not in before
    plain = tmp_path / "plain.py"
    plain.write_text(before)
    run_job(str(plain), timeout=120)


@documents
def test_code_blocks_are_code(document: Path) -> None:
    """A block of another language would not be looked at."""
    known = ("python", "diff", "text", *SHELL)
    opened = re.findall(r"^```(\w*)$", document.read_text(), re.MULTILINE)[::2]
    assert set(opened) <= set(known)
    for block in blocks(document, "python"):
        compile(block.source, place(block), "exec")


# -- shell ------------------------------------------------------------------------------------------------------------


def commands() -> list[Any]:
    """Every command of every shell block and every command in backticks that starts like one."""
    found: dict[str, str] = {}
    for document in DOCUMENTS:
        for block in blocks(document, *SHELL):
            for line in block.source.splitlines():
                if line and not line.startswith("#"):
                    found.setdefault(re.sub(r"\s+#.*", "", line), name(document))
        for span in code_spans(document):
            if re.match(r"(make|python -m|horovodrun|mpirun|ringprune|mpi_scripts/\S+) [a-z-]", span):
                found.setdefault(span, name(document))
    return [pytest.param(command, id=f"{where}: {command}") for command, where in found.items()]


@pytest.mark.parametrize("command", commands())
def test_commands_exist(command: str) -> None:
    words = command.split()
    makefile = ROOT / "Makefile"
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", makefile.read_text(), re.MULTILINE)
        set_up = "".join(path.read_text() for path in [makefile, *ROOT.glob("mpi_scripts/environment/*.py")])
        for word in words[1:]:
            variable = re.match(r"([A-Z_]+)=", word)
            if variable:
                assert re.search(rf"\b{variable[1]}\b", set_up), f"{variable[1]}: neither Makefile nor set-up reads it"
            else:
                assert word in targets
    for word in words:
        if re.match(rf"({'|'.join(FOLDERS)})/", word):
            assert (ROOT / word).exists()
    if "ringprune" in words:
        check_options(words[words.index("ringprune") + 1 :])
    scripts = [word for word in words if word.startswith("examples/") and word.endswith(".py")]
    own = words[words.index(scripts[0]) :] if scripts else []  # what comes before is the launcher's
    for option in [word.split("=")[0] for word in own if word.startswith("--")]:
        sources = (ROOT / "examples" / "options.py").read_text() + (ROOT / scripts[0]).read_text()
        assert f'"{option}"' in sources


def check_options(words: list[str]) -> None:
    """Whether ``ringprune`` has such a command with such options."""
    command: list[str] = []
    while commands := re.findall(r"^ {4}([a-z]+) ", help_of(*command), re.MULTILINE):
        if not words or words[0].startswith("--"):
            break
        assert words[0] in commands, f"ringprune {' '.join(command)} has no command {words[0]}"
        command.append(words.pop(0))
    for option in [word.split("=")[0] for word in words if word.startswith("--")]:
        assert re.search(rf"(?<!\S){option}(?![\w-])", help_of(*command)), f"{' '.join(command)} has no {option}"


@functools.cache
def help_of(*arguments: str) -> str:
    command = [sys.executable, "-m", "ringprune", *arguments, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- links and names --------------------------------------------------------------------------------------------------


@pages
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        if link.startswith("https://"):
            continue
        path, _, fragment = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link}: leaves the project"
        assert not fragment or fragment in anchors(target), f"{link}: no such heading"


@pages
def test_files_named_exist(document: Path) -> None:
    for span in code_spans(document):
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]*", span):
            assert (ROOT / span).exists(), f"`{span}`: no such file"
        if re.fullmatch(r"[\w/]+\.(py|cpp|cu|h)", span) and "/" not in span:
            assert list(ROOT.glob(f"[a-z]*/**/{span}")) or (ROOT / span).exists(), f"`{span}`: no such file"


@pages
def test_documents_name_no_machine(document: Path) -> None:
    found = re.search(f"{MACHINE}|{OTHER_HOST}", document.read_text())
    assert not found, f"line {document.read_text().count(chr(10), 0, found.start()) + 1}: {found[0]}"


def test_documents_named_in_code_exist() -> None:
    for file in [*ROOT.glob("ringprune/**/*.py"), *ROOT.glob("csrc/**/*.*"), *ROOT.glob("examples/**/*.py")]:
        for document in re.findall(r"docs/[\w-]+\.md", file.read_text()):
            assert (ROOT / document).exists(), f"{name(file)} names {document}"


def test_index_names_every_page() -> None:
    pages = {link.partition("#")[0] for link in links(ROOT / "docs" / "index.md")}
    assert {path.name for path in ROOT.glob("docs/*.md")} - {"index.md"} <= pages


# -- the API page -----------------------------------------------------------------------------------------------------

API = ROOT / "docs" / "api.md"


def section(heading: str) -> str:
    """What stands under a heading of the API page."""
    parts = re.split(r"^#+ ", prose(API), flags=re.MULTILINE)
    return next(part for part in parts if part.partition("\n")[0].replace("`", "") == heading)


def rows(heading: str) -> set[str]:
    """First cells, without backticks, of the table under a heading of the API page."""
    return {match[1] for match in re.finditer(r"^\| `([\w.]+)", section(heading), re.MULTILINE)}


def test_every_public_name_is_documented() -> None:
    assert rows("Names") == set(rp.__all__)


DOCUMENTED = [rp.DistributedOptimizer, rp.IWP, rp.Warmup, rp.Guard, rp.LocalSteps, rp.LayerPriority, rp.Rows]


@pytest.mark.parametrize("function", DOCUMENTED, ids=lambda f: f.__name__)
def test_every_argument_is_documented(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    refused = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD  # what has no name of its own
    arguments = {p.name for p in parameters if p.kind not in refused}
    assert rows(function.__name__) == arguments


@pytest.mark.parametrize("name", ["DGC", "MIPD", "OkTopk", "RandomK", "ScaleCom", "SlimDP"])
def test_what_other_policies_take_is_documented(name: str) -> None:
    """What all take stands before the table; their rows have the rest, and defaults that are not IWP's."""
    before, _, table = section("Other policies").partition("| function |")
    row = next(line for line in table.splitlines() if line.startswith(f"| `{name}`"))
    more, other = row.split("|")[2:4]
    common = set(re.findall(r"`(\w+)`", before.partition("The others take")[2])) - {"IWP"}
    parameters = inspect.signature(getattr(rp, name)).parameters
    assert common | set(re.findall(r"`(\w+)`", more)) == set(parameters)
    usual = inspect.signature(rp.IWP).parameters
    differing = {p: str(v.default) for p, v in parameters.items() if p in usual and v.default != usual[p].default}
    assert dict(re.findall(r"`(\w+)` `?\"?([\w.]+)", other)) == differing


def test_every_key_of_a_report_is_documented() -> None:
    line: Any = {"calls": 0, "elapsed_seconds": 0.0, "values": {}, "stats": {}}
    cells = re.findall(r"^\|([^|]+)\|", section("Rows of a report"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", "".join(cells))) == set(row_of(Path("run.jsonl"), [line, line]))


def test_every_method_is_documented() -> None:
    own = {key for key in vars(rp.DistributedOptimizer) if not key.startswith("_")}
    assert rows("Methods of the wrapper") == own


def test_every_statistic_is_documented() -> None:
    def rank(comm: Any) -> dict[str, Any]:
        model = torch.nn.Linear(64, 64)
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), comm=comm
        )
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        return optimizer.stats()

    stats = rp.simulate(1, rank)[0]
    assert rows("Stats") == set(stats)
    assert set(stats["seconds"]) <= set(code_spans(API))
