"""Which events are told, and what each message says."""

from __future__ import annotations

import math

import pytest

from ddptrain.notify.messages import (
    Message,
    RetrainReport,
    compose,
    compose_test,
    events_to_tell,
    html,
    markdown,
    next_commands,
    plain_text,
    title,
)

DEFAULT = ("failed", "rejected", "recovered", "late")
EVERYTHING = (*DEFAULT, "promoted", "always")


@pytest.mark.parametrize(
    ("on", "status", "earlier", "told"),
    [
        # the first time, and while it lasts
        (DEFAULT, "failed", [], ("failed",)),
        (DEFAULT, "failed", None, ("failed",)),
        (DEFAULT, "failed", "failed", ()),
        (DEFAULT, "failed", ["failed"], ()),
        (DEFAULT, "rejected", [], ("rejected",)),
        (DEFAULT, "rejected", ["rejected"], ()),
        (DEFAULT, "late", ["promoted"], ("late",)),
        (DEFAULT, "late", ["late"], ()),
        # another state
        (DEFAULT, "failed", ["rejected"], ("failed",)),
        (DEFAULT, "rejected", ["failed"], ("rejected",)),
        (DEFAULT, "late", ["failed"], ("late",)),
        (DEFAULT, "failed", ["late"], ("failed",)),
        (DEFAULT, "failed", ["rejected", "failed", "rejected"], ("failed",)),
        # a model is late and its retrainings fail: both last
        (DEFAULT, "failed", ["failed", "late"], ()),
        (DEFAULT, "late", ["late", "failed"], ()),
        (DEFAULT, "rejected", ["failed", "late"], ("rejected",)),
        # a success ends a state
        (DEFAULT, "failed", ["failed", "promoted"], ("failed",)),
        (DEFAULT, "failed", ["failed", "unchanged"], ("failed",)),
        (DEFAULT, "promoted", ["failed"], ("recovered",)),
        (DEFAULT, "unchanged", ["rejected"], ("recovered",)),
        (DEFAULT, "promoted", "late", ("recovered",)),
        (DEFAULT, "promoted", ["failed", "promoted"], ()),
        (DEFAULT, "promoted", [], ()),
        (DEFAULT, "unchanged", ["promoted"], ()),
        # what is neither good nor bad changes nothing
        (DEFAULT, "failed", ["failed", "interrupted", "skipped", "deadline", "abandoned"], ()),
        (DEFAULT, "promoted", ["failed", "interrupted"], ("recovered",)),
        (DEFAULT, "interrupted", ["failed"], ()),
        (DEFAULT, "deadline", [], ()),
        (DEFAULT, "skipped", ["failed"], ()),
        # only what was asked for
        ((), "failed", [], ()),
        (("rejected",), "failed", [], ()),
        (("failed",), "promoted", ["failed"], ()),
        (("promoted",), "promoted", ["failed"], ("promoted",)),
        (EVERYTHING, "promoted", ["failed"], ("recovered", "promoted")),
        (EVERYTHING, "promoted", [], ("promoted",)),
        (EVERYTHING, "failed", ["failed"], ("always",)),
        (EVERYTHING, "failed", [], ("failed",)),
        (("always",), "failed", [], ("always",)),
        (("always",), "unchanged", [], ("always",)),
        (("always",), "interrupted", [], ("always",)),
        (("always",), "deadline", [], ("always",)),
        (EVERYTHING, "skipped", [], ()),
        (EVERYTHING, "running", [], ()),
        (EVERYTHING, "abandoned", [], ()),
    ],
)
def test_only_changes_of_state_are_told(
    on: tuple[str, ...], status: str, earlier: str | list[str] | None, told: tuple[str, ...]
) -> None:
    assert events_to_tell(on, status, earlier) == told


REJECTED = RetrainReport(
    event="rejected",
    model="petnames",
    status="rejected",
    reason="val/loss is 2.61, above at_most 2.6",
    scores={"candidate": {"val/loss": 2.61, "acc": math.nan}, "champion": {"val/loss": 2.55, "top5": 0.5}},
    gate=["val/loss: 2.61 is above at_most 2.6"],
    difference=["+312 names"],
    version=4,
    champion=3,
    run_id="petnames-1",
    duration_s=130.2,
    exit_code=7,
    host="vm",
    folder="/srv/pets",
    config="/srv/pets/petnames nightly.yaml",
    models_dir="s3://bucket/models",
)
REJECTED_TEXT = """\
Version 4 of petnames did not pass the gate. Version 3 is still the champion.

Retraining
  reason         val/loss is 2.61, above at_most 2.6
  exit code      7
  run            petnames-1
  duration       2m 10s
  host           vm
  configuration  /srv/pets/petnames nightly.yaml

METRIC    CANDIDATE  CHAMPION  DIFFERENCE
acc       nan        -         -
top5      -          0.5       -
val/loss  2.61       2.55      +0.06

Gate
  val/loss: 2.61 is above at_most 2.6

Data
  +312 names

To look further on vm, in /srv/pets:
  ddptrain results show petnames-1
  ddptrain models show petnames --models-dir s3://bucket/models
  ddptrain models promote petnames 4 --models-dir s3://bucket/models"""
REJECTED_MARKDOWN = """\
Version 4 of **petnames** did not pass the gate. Version 3 is still the champion.

- reason: `val/loss is 2.61, above at_most 2.6`
- exit code: `7`
- run: `petnames-1`
- duration: `2m 10s`
- host: `vm`
- configuration: `/srv/pets/petnames nightly.yaml`

**Metrics**

- `acc`: nan, champion -
- `top5`: -, champion 0.5
- `val/loss`: 2.61, champion 2.55 (+0.06)

**Gate**

- `val/loss: 2.61 is above at_most 2.6`

**Data**

- `+312 names`

**To look further on vm, in /srv/pets**

- `ddptrain results show petnames-1`
- `ddptrain models show petnames --models-dir s3://bucket/models`
- `ddptrain models promote petnames 4 --models-dir s3://bucket/models`"""


REJECTED_HTML = """\
<p>Version 4 of petnames did not pass the gate. Version 3 is still the champion.</p>
<ul>
<li>reason: val/loss is 2.61, above at_most 2.6</li>
<li>exit code: 7</li>
<li>run: petnames-1</li>
<li>duration: 2m 10s</li>
<li>host: vm</li>
<li>configuration: /srv/pets/petnames nightly.yaml</li>
</ul>
<p><b>Metrics</b></p>
<ul>
<li>acc: nan, champion -</li>
<li>top5: -, champion 0.5</li>
<li>val/loss: 2.61, champion 2.55 (+0.06)</li>
</ul>
<p><b>Gate</b></p>
<ul>
<li>val/loss: 2.61 is above at_most 2.6</li>
</ul>
<p><b>Data</b></p>
<ul>
<li>+312 names</li>
</ul>
<p><b>To look further on vm, in /srv/pets</b></p>
<ul>
<li>ddptrain results show petnames-1</li>
<li>ddptrain models show petnames --models-dir s3://bucket/models</li>
<li>ddptrain models promote petnames 4 --models-dir s3://bucket/models</li>
</ul>"""


def test_message_of_a_rejection_is_complete() -> None:
    assert plain_text(REJECTED) == REJECTED_TEXT
    assert markdown(REJECTED) == REJECTED_MARKDOWN
    assert compose(REJECTED) == Message(
        "petnames: version 4 did not pass the gate", REJECTED_TEXT, REJECTED_MARKDOWN, REJECTED_HTML, "warning"
    )


def report(event: str, status: str = "", **more: object) -> RetrainReport:
    return RetrainReport(event=event, model="names", status=status or event, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "expected_title", "headline", "kind"),
    [
        (
            report("failed", reason="ValueError: no names", champion=3),
            "names: retraining failed: ValueError: no names",
            "The retraining of names failed. Version 3 is still the champion.",
            "failure",
        ),
        (report("failed"), "names: retraining failed", "The retraining of names failed.", "failure"),
        (
            report("rejected"),
            "names: the new version did not pass the gate",
            "The new version of names did not pass the gate.",
            "warning",
        ),
        (
            report("late", champion=2),
            "names: no successful retraining in time",
            (
                "names has had no successful retraining for longer than its schedule allows. "
                "Version 2 is still the champion."
            ),
            "failure",
        ),
        (
            report("recovered", "promoted", version=4, champion=3),
            "names: works again, version 4 is the champion",
            "names: works again: version 4 is the champion. The champion before was version 3.",
            "success",
        ),
        (
            report("recovered", "unchanged", champion=3),
            "names: works again, the model is up to date",
            "names works again: the model is up to date. Version 3 is still the champion.",
            "success",
        ),
        (
            report("promoted", version=1),
            "names: version 1 is the champion",
            "names: version 1 is the champion.",
            "success",
        ),
        (
            report("always", "unchanged", champion=1),
            "names: retraining ended: unchanged",
            "The retraining of names ended with the status unchanged. Version 1 is still the champion.",
            "info",
        ),
    ],
)
def test_each_event_says_what_happened(told: RetrainReport, expected_title: str, headline: str, kind: str) -> None:
    assert title(told) == expected_title
    assert plain_text(told).splitlines()[0] == headline
    assert markdown(told).splitlines()[0].replace("**", "") == headline
    assert compose(told).kind == kind


@pytest.mark.parametrize(
    ("told", "commands"),
    [
        (
            report("failed", run_id="r-1", runs_dir="/srv/my runs", config="c.yaml"),
            [
                "ddptrain results show r-1 --runs-dir '/srv/my runs'",
                "ddptrain results logs r-1 --runs-dir '/srv/my runs'",
                "ddptrain retrain c.yaml",
            ],
        ),
        (report("failed"), []),
        (report("rejected"), ["ddptrain models show names"]),
        (
            report("late", config="c.yaml"),
            ["ddptrain models show names --history", "ddptrain schedule list", "ddptrain retrain c.yaml"],
        ),
        (
            report("recovered", "promoted", version=2, champion=1),
            ["ddptrain models show names", "ddptrain models show names --history", "ddptrain models rollback names"],
        ),
        (report("promoted", version=1), ["ddptrain models show names", "ddptrain models show names --history"]),
        (report("always", "failed", run_id="r-1"), ["ddptrain results show r-1", "ddptrain results logs r-1"]),
        (
            report("always", "deadline", run_id="r-1"),
            ["ddptrain results show r-1", "ddptrain models show names --history"],
        ),
    ],
)
def test_message_names_the_commands_to_look_further(told: RetrainReport, commands: list[str]) -> None:
    assert next_commands(told) == commands


def test_texts_of_other_people_stay_on_their_line() -> None:
    reason = "Error: \x1b[31mred\x1b[0m\n**bold** `code` " + "x" * 1000
    told = report("failed", reason=reason, gate=["a\nb"])
    assert "\x1b" not in plain_text(told) + markdown(told) + title(told)
    assert len(title(told)) == 120
    assert max(len(line) for line in plain_text(told).splitlines()) < 550
    assert "**bold** 'code' x" in markdown(told)
    assert "&lt;b&gt;" in html(report("failed", reason="<b>")) and "<b>&" not in html(report("failed", reason="<b>"))
    assert [line for line in markdown(told).splitlines() if line.startswith("- root cause: `")]


def test_success_has_neither_reason_nor_exit_code() -> None:
    text = plain_text(report("promoted", version=1, reason="it is better", exit_code=0, host="vm"))
    assert text.splitlines()[2:4] == ["Retraining", "  host  vm"]


def test_many_metrics_are_cut() -> None:
    told = report("rejected", scores={"candidate": {f"metric{number:03d}": 1.0 for number in range(100)}})
    assert "metric019" in plain_text(told)
    assert "metric020" not in plain_text(told)


def test_test_message_names_host_and_configuration() -> None:
    message = compose_test("vm", "/srv/c.yaml")
    assert "vm" in message.text and "/srv/c.yaml" in message.text
    assert message.kind == "info"
