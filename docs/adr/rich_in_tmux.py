"""Shows rich's live display in a tmux pane that becomes narrower: `python docs/adr/rich_in_tmux.py`.

It prints the last screen and exits with 1 if bars of an earlier frame are left on it. tmux must be installed.
"""

from __future__ import annotations

import subprocess
import sys
import time

RANKS, SECONDS = 4, 6.0


def draw() -> None:
    """Four bars and a log line every 0.1 s, as rich's documentation has it."""
    from rich.progress import Progress

    for line in range(60):  # a full screen: tmux itself moves rows of one that is not full into its history
        print("line", line)
    with Progress() as progress:
        tasks = [progress.add_task(f"rank {rank} on host-{rank}", total=60) for rank in range(RANKS)]
        for step in range(int(SECONDS / 0.1)):
            for rank, task in enumerate(tasks):
                progress.advance(task)
                if step % 10 == 0:
                    progress.console.print(f"[rank {rank}] step {step} loss 0.1234", markup=False)
            time.sleep(0.1)


def main() -> int:
    """Run `draw` in a pane of 100 columns, make it 40 columns wide, and look."""
    tmux = ["tmux", "-L", "rich-in-tmux", "-f", "/dev/null"]
    command = f"{sys.executable} {__file__} draw; sleep 30"
    subprocess.run([*tmux, "new-session", "-d", "-x", "100", "-y", "40", command], check=True)
    try:
        time.sleep(SECONDS / 2)
        for columns in (80, 60, 40):
            subprocess.run([*tmux, "resize-window", "-x", str(columns), "-y", "40"], check=True)
            time.sleep(0.3)
        time.sleep(SECONDS)
        screen = subprocess.run([*tmux, "capture-pane", "-p", "-S", "-200"], check=True, capture_output=True, text=True)
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    print(screen.stdout.rstrip())
    bars = sum("on host-0" in line and "[rank" not in line for line in screen.stdout.splitlines())
    print(f"\nrank 0 has {bars} bars on the screen; 1 is right")
    return int(bars != 1)


if __name__ == "__main__":
    if sys.argv[1:] == ["draw"]:
        draw()
    else:
        sys.exit(main())
