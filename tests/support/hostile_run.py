"""Writes a run directory whose every file attacks a reader: markup, scripts, bidi characters, long lines."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

MARK = "attacked"
ATTACKS = (
    f"</script><script>document.title='{MARK}'</script>",
    f"<img src=x onerror=\"document.title='{MARK}'\">",
    f"\"' onfocus=document.title='{MARK}' autofocus x='",
    f"javascript:document.title='{MARK}'",
    "{{ 7 * 191 }}{% raw %}<!--",
    "\u202eevil\u2066\u200b\x00\x1b]0;title\x07\ud800",
    "http://127.0.0.1:9/pixel.png",
)
ATTACK = " ".join(ATTACKS)
LONG_BYTES = 10 << 20


def write_hostile_run(folder: Path) -> Path:
    """Write the run directory and return it."""
    for name in ("logs", "artifacts/images/x", "artifacts/tables/t", "artifacts/predictions"):
        (folder / name).mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run_id": folder.name, **_record()}, ensure_ascii=True))
    (folder / "config.yaml").write_text(
        json.dumps({"workload": ATTACK, "name": "x" * 1000, "params": {ATTACK: ATTACK, "deep": [[[[ATTACK]]]]}})
    )
    (folder / "events.jsonl").write_bytes(b"\n".join(_events()))
    (folder / "metrics.jsonl").write_bytes(b"\n".join(_metrics()))
    log = ATTACK.encode("utf-8", "replace") + b"\n"
    (folder / "logs/rank-0.log").write_bytes(b"y" * LONG_BYTES + b"\n" + log * 50 + b"z" * LONG_BYTES)
    (folder / "logs/rank-1.log").write_bytes(b"\r" * 300_000 + log)
    (folder / "logs/rank-2.log").symlink_to("/etc/passwd")
    _write_artifacts(folder / "artifacts")
    return folder


def _record() -> dict[str, object]:
    ranks = [{"rank": 0, "host": ATTACK, "exit": 1}, {"rank": 10**30, "host": ATTACK}]
    frame = f'  File "/home/{ATTACKS[0]}.py", line 3, in {ATTACKS[1]}\n    {ATTACK}\n'
    return {
        "name": ATTACK, "workload": ATTACK, "status": ATTACK, "exit_code": 10**300,
        "started_at": "0001-01-01T00:00:00+14:00", "duration_s": 1e308, "world_size": 10**40,
        "attempts": [{"attempt": 1, "outcome": ATTACK, "ranks": ranks}],
        "failure": {"rank": 0, "host": ATTACK, "kind": ATTACK, "type": ATTACK, "message": ATTACK * 20_000,
                    "traceback": f"Traceback (most recent call last):\n{frame * 20_000}", "log": ATTACK},
        "git": {"commit": ATTACK, "dirty": True},
        "code": {"hash": ATTACK, "folder": ATTACK},
        "versions": {ATTACK + str(at): ATTACK * 10 for at in range(1000)},
        "rank_environment": {ATTACK + str(at): {"value": ATTACK * 10, "source": ATTACK} for at in range(1000)},
        "last_metrics": {ATTACK: 1.0}, "best": {"metric": ATTACK, "value": 1e308, "step": 10**40},
        "checkpoints": [ATTACK] * 1000,
        "tracking": {ATTACK: {"url": ATTACKS[3]}, "w": {"url": f"https://x.example/{ATTACK}"}},
        "result": {ATTACK: [ATTACK] * 1000},
    }  # fmt: skip


def _events() -> list[bytes]:
    events: list[dict[str, object]] = [
        {"time_s": 1.0, "event": "run_started", "attempt": ATTACK},
        {"time_s": 1e308, "event": "rank_started", "rank": 0, "host": ATTACK},
        {"time_s": "now", "event": "rank_started", "rank": 0},
        {"time_s": 3.0, "event": "entered", "rank": 0},
        {"time_s": 4.0, "event": "checkpoint_staged", "rank": 0, "step": ATTACK},
        {"time_s": 5.0, "event": "fault", "rank": 0, "message": ATTACK},
        {"time_s": -1e308, "event": "rank_ended", "rank": 10**30},
    ]
    return [*(json.dumps(event).encode() for event in events), b'{"time_s"' + b"[" * 100_000, b"\xff" * LONG_BYTES]


def _metrics() -> list[bytes]:
    lines = [
        {"time_s": step * 1e300, "step": step, "rank": step % 3, ATTACK: step, "val/loss": 10.0**step}
        for step in range(300)
    ]
    many = {f"{ATTACK}{at}": at for at in range(5000)}
    return [
        *(json.dumps(line).encode() for line in lines),
        json.dumps({"time_s": 1, "rank": 0, "n" * LONG_BYTES: 1}).encode(),
        json.dumps({"time_s": 1, "step": 1, "rank": 10**30, **many}).encode(),
        b'{"rank": 0, "x": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"\x00" * LONG_BYTES,
    ]


def _write_artifacts(folder: Path) -> None:
    (folder / "images/x/step-1-rank-0.png").write_bytes(_png(60_000, 60_000))
    (folder / "images/x/step-2-rank-0.png").write_text(f"<svg xmlns='http://www.w3.org/2000/svg'>{ATTACKS[0]}</svg>")
    (folder / f"images/x/<script>{MARK}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\x00" * 100)
    (folder / "images/x/link.png").symlink_to("/etc/passwd")
    table = f'"{ATTACKS[1]}",image\n"{"c" * LONG_BYTES}",images/../../../../etc/passwd.png\n'
    (folder / "tables/t/rank-0.csv").write_text(table + '"<b>x</b>",images/x/link.png\n' * 1000)
    rows = "".join(f"<i>{at}</i>,{ATTACKS[0]}{at % 100},<b>{at % 90}</b>,nan\n" for at in range(5000))
    (folder / "predictions/rank-0.csv").write_text("key,label,prediction,probability\n" + rows)


def _png(width: int, height: int) -> bytes:
    """A small file that decodes to an enormous picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\x00" * (1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
