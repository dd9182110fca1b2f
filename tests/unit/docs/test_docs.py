"""Pages that are generated: the man page, the references, and files that the docs show."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import typer.main
import yaml

from ddptrain.cli.main import app
from ddptrain.config.json_schema import config_schema
from tests.docs.man_page import TARGET, man_page, roff
from tests.docs.reference import configuration_page

# --- The man page that ships is the present one, and the formatter has no complaint ---


def test_page_is_that_of_the_parser() -> None:
    page = man_page()
    assert TARGET.read_text(encoding="utf-8") == page, "run make schema"
    assert '.SS "ddptrain results show' in page and "\\fB\\-\\-max\\-restarts" not in page


def test_text_is_escaped() -> None:
    assert roff(".start --set a\\b\n'x") == "\\&.start \\-\\-set a\\eb\n\\&'x"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_formatter_has_no_complaint() -> None:
    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z", TARGET], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- The page of the configuration's fields ---


SCHEMA = {
    "$defs": {
        "Part": {
            "description": "A part.",
            "properties": {
                "size": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 31536000,
                    "default": 3,
                    "description": "How | many.",
                },
                "word": {"anyOf": [{"enum": ["a", "b"], "type": "string"}, {"type": "null"}], "default": None},
                "mode": {"enum": ["off", False], "default": "off"},
                "inner": {"anyOf": [{"$ref": "#/$defs/Inner"}, {"type": "null"}], "default": None},
            },
            "required": ["word"],
        },
        "Inner": {"properties": {"names": {"type": "array", "items": {"type": "string"}}}},
        "toy.params": {"properties": {"lr": {"type": "number", "exclusiveMinimum": 0, "default": 0.1}}},
    },
    "properties": {
        "name": {"type": "string", "description": "The name."},
        "part": {"$ref": "#/$defs/Part", "default": {}},
    },
    "required": ["name"],
}


def test_fields_sections_and_params_have_rows() -> None:
    page = configuration_page(SCHEMA)
    rows = [line for line in page.splitlines() if line.startswith(("| `", "##"))]
    assert rows == [
        "## The file",
        "| `name` | string | required | The name. |",
        "## `part`",
        "| `part.size` | integer, at least 1, at most 31,536,000 | `3` | How \\| many. |",
        "| `part.word` | `a`, `b` or null | required |  |",
        '| `part.mode` | `off`, `false` | `"off"` |  |',
        "| `part.inner` | section or null | `null` |  |",
        "### `part.inner`",
        "| `part.inner.names` | list of string |  |  |",
        "## `params` of `toy`",
        "| `params.lr` | number, above 0 | `0.1` |  |",
    ]
    assert "A part." in page


def test_every_section_of_the_configuration_is_on_the_page() -> None:
    schema = config_schema()
    page = configuration_page(schema)
    assert [name for name in schema["properties"] if f"`{name}`" not in page] == []
    assert "| `checkpoint.keep` | integer, at least 1 | `3` |" in page
    assert "| `workload` | " in page


# --- The files for other schedulers that docs/schedules.md has to copy are valid ---


PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"
BLOCKS = dict(re.findall(r'```yaml title="(\w+): [^\n]*\n(.*?)```', PAGE.read_text(), re.DOTALL))


def test_cron_job_has_the_schema_of_kubernetes() -> None:
    kubernetes_validate.validate(yaml.safe_load(BLOCKS["Kubernetes"]), "1.35", strict=True)


@pytest.mark.parametrize(("title", "schema"), [("GitHub", "github-workflows"), ("GitLab", "gitlab-ci")])
def test_workflow_has_its_published_schema(title: str, schema: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yml"
    path.write_text(BLOCKS[title])
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


# --- Commands that the pages name exist, with their options ---


ROOT = Path(__file__).parents[3]
COMMAND = re.compile(r"(?:`|^\$ |\$\()ddptrain ([a-z][^`\n]*)", re.MULTILINE)


def command_problem(words: list[str]) -> str | None:
    """What the parser does not know of a command; the words of a script, and options of torchrun, are not looked at."""
    node, options = typer.main.get_command(app), {"--help", "-h", "--runs-dir", "--models-dir", "--verbose"}
    for word in words:
        options |= {name for param in node.params for name in (*param.opts, *param.secondary_opts)}
        commands = getattr(node, "commands", None) or {}
        if word == "run" or not set(word) - set("."):
            return None
        if not word.startswith("-") and commands:
            if word not in commands:
                return f"no command {word}"
            node = commands[word]
        elif word.startswith("--") and word.partition("=")[0] not in options:
            return f"no option {word}"
    return None


def test_commands_in_the_docs_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    found = [(page, match[1]) for page in pages for match in COMMAND.finditer(page.read_text(encoding="utf-8"))]
    assert len(found) > 300
    wrong = []
    for page, text in found:
        words = re.split(r" [|>#;&]|\)|  ", text)[0].replace("'", "").replace('"', "").split()
        if problem := command_problem(words):
            wrong.append(f"{page.relative_to(ROOT)}: ddptrain {text}: {problem}")
    assert wrong == []
