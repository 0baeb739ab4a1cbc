"""What users read: short README, short sentences, links that resolve, and names that exist."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from zico.broker.protocol.messages import RefusedRequest, Saving
from zico.cli import command
from zico.cli.options import KEYS
from zico.lab.report.simulation import SimulatedLoad, SimulatedRow, SimulationReport
from zico.lab.simulator.compare import SimulatedJob
from zico.planning.saving.registry import DEVICE_PLANNERS
from zico.report.attribution import Attribution
from zico.report.model import JobFigures, PoolFigures, ProcessFigures, RunReport
from zico.scheduler.policies import POLICIES, policy_named

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
WRITTEN_BY_A_BENCHMARK = DOCS / "evaluation.md"
RECORDS = [WRITTEN_BY_A_BENCHMARK, DOCS / "results-history.md"]
"""Figures and what was measured with, not for a first reader."""
GUIDES = [README, *(page for page in sorted(DOCS.glob("*.md")) if page not in RECORDS)]
"""What users read, but for the pages on design."""
LINKED = [*GUIDES, *RECORDS, ROOT / "CONTRIBUTING.md", *sorted((DOCS / "design").glob("*.md"))]

PICTURES = ("tensor.md", "iteration.md")
"""Pages of ``docs/design`` that a newcomer reads first."""
MOST_STEPS = 10
STEP = re.compile(r"^\| (\d+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)

MOST_LINES = 160
MOST_COLUMNS = 100
MOST_WORDS = 25
SHORT_IN = ("zico", "adapters", "kernels", "lab")
"""Where docstrings and comments have short sentences."""


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(text: str) -> Iterator[str]:
    """Yield paragraphs and list items, without code blocks, tables, headings and pictures."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )|\n(?=#)", text):
        if not block.strip("\n").startswith(("    ", "|", "#", "!", ":::")):
            yield re.sub(r"^\s*(?:[*-]|\d+\.) ", "", block.strip())


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page; code counts as one word, a link as its text."""
    for block in prose(text):
        plain = re.sub(r"`[^`]+`", "code", block)
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        yield from re.split(r"(?<=[.!?])[\"*)]*\s+", plain)


def words(sentence: str) -> list[str]:
    """Return the words of a sentence."""
    return [word for word in sentence.split() if re.search(r"\w", word)]


def too_long(text: str) -> list[str]:
    """Return the sentences of a page that have too many words."""
    return [sentence for sentence in sentences(text) if len(words(sentence)) > MOST_WORDS]


def slug(heading: str) -> str:
    """Return a heading's anchor, as GitHub and the site make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def broken_links(page: Path, text: str) -> list[str]:
    """Return the relative links of a page that lead to no file, or to no heading of a page."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / path) if path else page
        if not file.exists():
            broken.append(target)
        elif anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            if anchor not in {slug(heading) for heading in headings}:
                broken.append(target)
    return broken


def _commands(name: str, of: click.Command) -> dict[str, click.Command]:
    """Return a command and its subcommands, by the words that call each."""
    found = {name: of}
    if isinstance(of, click.Group):
        context = click.Context(of)
        for child in of.list_commands(context):
            sub = of.get_command(context, child)
            assert sub is not None
            found |= _commands(f"{name} {child}".strip(), sub)
    return found


COMMANDS = _commands("", command)
OPTIONS = {
    name: {option for one in of.params for option in one.opts} | {"--help", "-h"} for name, of in COMMANDS.items()
}
OPTIONS["trace"] = OPTIONS["trace record"]  # ``record`` may be left out


def unknown_options(text: str) -> list[str]:
    """Return what a page says of ``zico`` that the command line does not have."""
    unknown = []
    code = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*$", "", text, flags=re.MULTILINE))
    code += re.findall(r"^    (?:\$ )?(.+)$", text, flags=re.MULTILINE)
    for span in code:
        if "PIP_FLAGS" in span:
            continue
        said = re.sub(r'"[^"]*"', "", span).partition(" -- ")[0].split()
        options = {word.partition("=")[0] for word in said if re.match(r"-(?:-[a-z]|[a-z]$)", word)}
        if said[:1] == ["zico"] and len(said) > 1 and not said[1].startswith("-"):
            names = [" ".join(said[1 : n + 1]) for n in (2, 1) if " ".join(said[1 : n + 1]) in OPTIONS]
            known = OPTIONS[names[0]] if names else set()
            unknown += [f"zico {said[1]}"] if not names else []
        elif said[:1] and said[0].startswith("--"):
            known = set.union(*OPTIONS.values())
        else:
            continue
        unknown += [f"{option} in {span!r}" for option in sorted(options - known)]
    return unknown


def test_the_readme_is_short() -> None:
    """README has at most 160 lines of at most 100 columns."""
    lines = README.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > MOST_COLUMNS] == []


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_sentences_are_short(page: Path) -> None:
    """No sentence has more than 25 words, and no line of prose more than 100 columns."""
    assert too_long(page.read_text()) == []
    assert [line for block in prose(page.read_text()) for line in block.splitlines() if len(line) > MOST_COLUMNS] == []


def said_in(source: str) -> Iterator[str]:
    """Yield the paragraphs of a program's docstrings and comments, but for drawings and code behind ``::``."""
    texts = list(_strings(ast.parse(source)))
    texts += re.findall(r"(?:^ *#(?! ruff: ).*\n)+", source, flags=re.MULTILINE)
    for text in texts:
        plain = re.sub(r"(?m)^ *# ?(?:-- .*)?", "", inspect.cleandoc(text).replace("``", "`"))
        plain = re.sub(r"::\n(?:\n| {4,}.*(?:\n|$))+", ":\n\n", plain)
        yield from re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )|\n(?=\s+[\w*]+: )|(?<![^\n])\w[\w ]*:?\n(?= )", plain)


def _strings(tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a program, those behind constants and fields, too."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def too_long_in(source: str) -> list[str]:
    """Return the sentences of a program's docstrings and comments that have too many words."""
    return [one for text in said_in(source) for one in too_long(" ".join(text.split()))]


@pytest.mark.parametrize("folder", SHORT_IN)
def test_sentences_of_docstrings_and_comments_are_short(folder: str) -> None:
    """In these folders no docstring or comment has a sentence of more than 25 words."""
    found = {_name(path): too_long_in(path.read_text()) for path in sorted((ROOT / folder).rglob("*.py"))}
    assert {name: some for name, some in found.items() if some} == {}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_sentences_of_help_are_short(name: str) -> None:
    """No command's help has a sentence of more than 25 words; a list of what may be chosen counts as one."""
    texts = [COMMANDS[name].help or "", *(getattr(one, "help", None) or "" for one in COMMANDS[name].params)]
    assert too_long("\n\n".join(re.sub(r"(?:[\w-]+, ){3,}[\w-]+", "choices", text) for text in texts)) == []


def test_a_long_sentence_of_a_program_is_found() -> None:
    """The check sees docstrings, sections, items and comments, and neither drawings nor statements."""
    long = " ".join(["word"] * (MOST_WORDS + 1)) + "."
    assert too_long_in(f'"""{long}"""\n') == [long]
    assert too_long_in(f'def f():\n    """Do.\n\n    Args:\n        x: It.\n        y: {long}\n    """\n') == [
        f"y: {long}"
    ]
    assert too_long_in(f'"""A.\n\nGuarantees\n    * It.\n    * {long}\n"""\n') == [long]
    assert too_long_in(f"# -- title ----\n#\n# {long[:39]}\n# {long[40:]}\n") == [long]
    assert too_long_in(f'"""A drawing::\n\n    {long}\n    {long}\n\nEnd.\n"""\nx = "{long}"\n') == []


def test_a_long_sentence_is_found() -> None:
    """The check sees a sentence of 26 words in a paragraph and in a list, and not in code or tables."""
    long = " ".join(["word"] * (MOST_WORDS + 1)) + "."
    fits = " ".join(["word"] * MOST_WORDS) + "."
    assert too_long(f"# Title\n\n{fits} {fits}\n{long} {fits}\n\n* {fits}\n* {long}\n") == [long, long]
    assert too_long(f"```\n{long}\n```\n\n    {long}\n\n| {long} |\n| --- |\n") == []


@pytest.mark.parametrize("page", LINKED, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link leads to a file of the repository, and every anchor to a heading."""
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    """The check sees a missing file and a missing heading."""
    text = "[a](docs/run.md) [b](docs/nowhere.md) [c](docs/run.md#no-such-heading) [d](https://example.org/x)"
    assert broken_links(README, text) == ["docs/nowhere.md", "docs/run.md#no-such-heading"]


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_commands_and_options_exist(page: Path) -> None:
    """Every ``zico`` command and every option that a page names is on the command line."""
    assert unknown_options(page.read_text()) == []


def test_an_unknown_option_is_found() -> None:
    """The check sees commands and options that do not exist, in text and in code."""
    text = "`zico run --fast`, `zico fly`, `--slow`\n\n    $ zico trace show FILE --csv X --pdf Y\n"
    said = ["--fast in 'zico run --fast'", "zico fly", "--slow in '--slow'"]
    assert unknown_options(text) == [*said, "--pdf in 'zico trace show FILE --csv X --pdf Y'"]


def spoken(text: str) -> Iterator[list[str]]:
    """Yield the words behind ``zico`` of each command that a page shows on lines of its own."""
    for line in re.findall(r"^    (?:\$ )?zico ((?:.*\\\n)*.*)$", text, flags=re.MULTILINE):
        yield shlex.split(line.replace("\\\n", " "), comments=True)


def refused(text: str) -> list[str]:
    """Return the commands of a page that the command line refuses before it looks at any file or pool."""
    found = []
    for words in spoken(text):
        name = next(" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS)
        context = click.Context(command, info_name="zico")
        rest = words[len(name.split()) :]
        if name == "trace":
            name = "trace record"
        try:
            COMMANDS[name].make_context(name, rest, parent=context)
        except click.ClickException as error:
            found.append(f"zico {' '.join(words)}: {error.format_message()}")
    return found


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_commands_are_understood(page: Path) -> None:
    """The command line takes every command that a page shows, with its options' values and arguments."""
    assert refused(page.read_text()) == []


def test_a_command_that_is_refused_is_found() -> None:
    """The check sees an option's value and an argument that the command line does not take."""
    text = "\n    zico limit\n    $ zico pause\n\n    zico broker status \\\n        extra  # why\n"
    assert [one.partition(": ")[0] for one in refused(text)] == ["zico pause", "zico broker status extra"]


def steps_without_code(page: str) -> list[str]:
    """Return what a picture's steps name that no file of the step has, and files that have nothing of it."""
    lost = []
    for number, files, functions in STEP.findall(page):
        named = re.findall("`([^`]+)`", functions)
        has = {}
        for file in re.findall("`([^`]+)`", files):
            tree = ast.parse((ROOT / file).read_text()) if (ROOT / file).exists() else ast.parse("")
            has[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        lost += [f"{number}: {name}" for name in named if not any(name in names for names in has.values())]
        lost += [f"{number}: {file}" for file, names in has.items() if not names & set(named)]
    return lost


@pytest.mark.parametrize("page", PICTURES)
def test_a_picture_has_at_most_ten_steps_and_each_is_in_the_code(page: str) -> None:
    """Each step of how a tensor gets its place and an iteration its start names files, and a function of each."""
    text = (DOCS / "design" / page).read_text()
    assert [int(number) for number, *_ in STEP.findall(text)] == list(range(1, MOST_STEPS + 1))
    assert len(re.findall(r"^\| \d+ \|", text, flags=re.MULTILINE)) == MOST_STEPS
    assert steps_without_code(text) == []
    assert f"]({page})" in (DOCS / "design" / "README.md").read_text().partition("\n## Pages")[0]


def test_a_step_that_leads_nowhere_is_found() -> None:
    """The check sees a function that no file has, a file that is not there, and one that has nothing of the step."""
    step = "| 7 | It waits | `zico/pool/waits.py`, `zico/no.py` | `wait`, `no_such` |"
    assert steps_without_code(step) == ["7: no_such", "7: zico/no.py"]
    assert steps_without_code(step.replace("`wait`, `no_such`", "`wait`").replace(", `zico/no.py`", "")) == []


def test_every_page_is_in_the_navigation() -> None:
    """The site's navigation names every page of docs, and only files that exist."""
    named = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(named) == sorted(["README.md", *(_name(page) for page in DOCS.rglob("*.md"))])


def test_the_settings_are_all_described() -> None:
    """The page on settings has every setting, and its variable."""
    page = (DOCS / "settings.md").read_text()
    assert [key for key in KEYS if f"`--{key}`" not in page] == []
    assert [key for key in KEYS if f"`ZICO_{key.replace('-', '_').upper()}`" not in page] == []


@pytest.mark.parametrize(
    "kind",
    [
        *(RunReport, PoolFigures, JobFigures, ProcessFigures, Saving, RefusedRequest, Attribution),
        *(SimulationReport, SimulatedRow, SimulatedJob, SimulatedLoad),
    ],
)
def test_the_reports_are_all_described(kind: type[msgspec.Struct]) -> None:
    """The page on reports has every field."""
    page = (DOCS / "reports.md").read_text()
    assert [name for name in kind.__struct_fields__ if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", POLICIES)
def test_the_policies_are_all_described(name: str) -> None:
    """The page on policies has every policy and every parameter with its default."""
    page = (DOCS / "policies.md").read_text()
    assert f"`{name}`" in page
    given = [f"`{one.name}={one.default}`" for one in policy_named(name).parameters]
    assert [text for text in given if text not in page] == []


def test_the_planners_for_a_gpu_are_all_named() -> None:
    """The page on GPUs names every planner that jobs can follow there, and no other."""
    (row,) = [line for line in (DOCS / "gpu.md").read_text().splitlines() if line.startswith("| `--save NAME` |")]
    assert tuple(re.findall("`([a-z-]+)`", row)) == DEVICE_PLANNERS
