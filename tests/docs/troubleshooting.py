"""Writes what docs/troubleshooting/ shares with `ddptrain explain`: `python -m tests.docs.troubleshooting`.

Between `<!-- explain CODE -->` and `<!-- end -->` a page has the causes and remarks of ddptrain/explain.py, with the
commands as code and with links. index.md has the titles between `<!-- explain titles -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from ddptrain.errors import ExitCode
from ddptrain.explain import EXPLANATIONS, explanation_of

FOLDER = Path(__file__).parents[2] / "docs" / "troubleshooting"
_BLOCK = re.compile(r"(<!-- explain (titles|\d+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Pages with several codes, or with another name than that of the code.
_PAGES = {
    7: "7-8.md#7-the-gate-rejected-the-new-version",
    8: "7-8.md#8-out-of-time",
}
_PAGES |= dict.fromkeys((129, 130, 131, 143), "130-143.md")
CODE = (
    'env: {CUDA_LAUNCH_BLOCKING: "1"}', "env: {NCCL_SOCKET_IFNAME: eth0, GLOO_SOCKET_IFNAME: eth0}",
    "env: {NCCL_DEBUG: INFO, NCCL_SOCKET_IFNAME: eth0}", "prepare: {precision: bf16}", "killed by SIGKILL",
    "killed by SIGSEGV or SIGABRT", "CUDA out of memory", "No module named ...", "ddptrain watch RUN",
    "ddptrain train CONFIG --run-id nightly --resume auto", "ddptrain train CONFIG --dry-run",
    "ddptrain results prune --keep 20", "ddptrain models promote MODEL VERSION", "ddptrain models show MODEL",
    "ddptrain cluster status NAME", "ddptrain cluster list", "ddptrain doctor --cluster NAME", "ddptrain schedule list",
    "ddptrain stop RUN", "ddptrain --version", "ddptrain retrain", "ddptrain results", "ddptrain schema",
    "ddptrain doctor", "ddptrain stop", "failure.max_restarts: 2", "failure.max_losses: 3",
    "failure.hang_timeout_s: 1800", "failure.hang_timeout_s: null", "failure.grace_s", "cluster.wait_s: 3600",
    "cluster.start_timeout_s", "cluster.tls", "tracking.strict: true", "retrain.deadline", "retrain.wait",
    "overlap: wait", "overlap: skip", "checkpoint.every_s: 300", "--full-traceback", "--allow-changes", "--runs-dir",
    "--resume RUN", "--run-id", "--force", "--ranks", "ctx.checkpoint", "ctx.progress", "ctx.loader",
    "ctx.mean", "all_reduce", "ddptrain predict", "logs/ddptrain.log", "artifacts/stacks/", "params.source",
    "params.names", "crontab -l",
    "systemctl --user list-timers", "Connection reset by peer", "dmesg", "retrain:",
)  # fmt: skip
LINKS = {
    "call it on all ranks": "../start/function.md#which-methods-all-ranks-must-call",
    "lists all fields": "../reference/configuration.md",
    "the handler of a script": "../start/script.md",
    "the gate": "../unattended.md#gate",
    "the schedule": "../schedules.md",
    "check the folder": "../start/images.md",
    "In sweeps": "../experiments.md",
}
_MARKED = re.compile("|".join(re.escape(each) for each in sorted((*CODE, *LINKS), key=len, reverse=True)))


def page_with_explanations(markdown: str) -> str:
    """Return a page with the text of explain.py in its blocks."""
    return _BLOCK.sub(lambda match: match[1] + "\n".join([*_text(match[2]), match[3]]), markdown)


def codes_of(markdown: str) -> list[int]:
    """The exit codes that a page explains."""
    return [int(match[2]) for match in _BLOCK.finditer(markdown) if match[2] != "titles"]


def marked(text: str) -> str:
    """Return a text with its commands and fields as code, and with links."""
    return _MARKED.sub(lambda match: f"[{match[0]}]({LINKS[match[0]]})" if match[0] in LINKS else f"`{match[0]}`", text)


def _text(code: str) -> list[str]:
    if code == "titles":
        return ["", "| exit code | |", "|---|---|", *(_title(code) for code in ExitCode), ""]
    found = explanation_of(int(code))
    rows = [f"| {marked(each.cause)} | {marked(each.action)} |" for each in found.causes]
    remarks = [line for remark in found.remarks.splitlines() for line in ("", marked(remark))]
    return ["", "| cause, or message | what to do |", "|---|---|", *rows, *remarks, ""]


def _title(code: ExitCode) -> str:
    page = _PAGES.get(code, f"{int(code)}.md")
    name = f"[{int(code)}](exit-{page})" if code else "0"
    return f"| {name} | {EXPLANATIONS[code].title} |"


def main() -> None:
    """Write all pages."""
    for page in sorted(FOLDER.glob("*.md")):
        old = page.read_text(encoding="utf-8")
        page.write_text(page_with_explanations(old), encoding="utf-8")


if __name__ == "__main__":
    main()
