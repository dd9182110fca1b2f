"""The files for other schedulers that docs/schedules.md has to copy are valid."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

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
