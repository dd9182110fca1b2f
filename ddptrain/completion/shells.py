"""Reads the request of a shell and writes the answer, as the scripts of `ddptrain --install-completion` expect them."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ddptrain.completion.candidates import Candidates, candidates, read_table
from ddptrain.completion.names import is_plain

VARIABLE = "_DDPTRAIN_COMPLETE"
_BREAKS = "=:@"  # characters at which bash splits a word; an answer replaces only the last part
_HELP_LENGTH = 80
_HELP_CHARACTERS = str.maketrans("'", "\u2019", '"`$\\')  # zsh reads the text between single quotes


def is_asked(environment: Mapping[str, str]) -> bool:
    """Return whether this process was started by a TAB in bash, zsh or fish; typer answers other shells."""
    return environment.get(VARIABLE) in ("complete_bash", "complete_zsh", "complete_fish")


def answer(environment: Mapping[str, str]) -> int:
    """Print the answer and return the exit code. An error prints nothing: it would disturb the line that is typed."""
    shell = environment[VARIABLE].removeprefix("complete_")
    try:
        before, word = bash_words(environment) if shell == "bash" else typed_words(environment)
        matches = {each: text for each, text in candidates(read_table(), before, word).items() if is_plain(each)}
    except Exception:  # a message would be printed into the line that the user edits
        if "DDPTRAIN_LOG" in environment:
            raise
        matches, word = {}, ""
    if shell == "fish" and environment.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
        return 0 if matches else 1
    if shell == "fish":
        text = "\n".join(f"{each}\t{_short(text)}" if text else each for each, text in matches.items())
    else:
        text = _bash(matches, word) if shell == "bash" else _zsh(matches)
    sys.stdout.write(f"{text}\n" if text else "")
    return 0


def bash_words(environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the words before the cursor, without the program, and the one under it. Bash splits words at = : and @."""
    text = environment["COMP_WORDS"]
    parts = text.split("\n") if "\n" in text else text.split()
    parts = parts[: int(environment["COMP_CWORD"]) + 1]
    if int(environment["COMP_CWORD"]) >= len(parts):
        parts.append("")
    words: list[str] = []
    for part in parts:
        if words and (_is_break(part) or _is_break(words[-1][-1:])):
            words[-1] += part
        else:
            words.append(part)
    return [_unquoted(word) for word in words[1:-1]], _unquoted(words[-1]) if len(words) > 1 else ""


def _is_break(part: str) -> bool:
    return bool(part) and part[0] in _BREAKS


def typed_words(environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the same for zsh and fish, which pass the line up to the cursor."""
    line = environment.get("_TYPER_COMPLETE_ARGS", "")
    words = line.split()
    if line[-1:].isspace() or not words:
        words.append("")
    return [_unquoted(word) for word in words[1:-1]], _unquoted(words[-1]) if len(words) > 1 else ""


def _unquoted(word: str) -> str:
    return word.strip("'\"")


def _bash(matches: Candidates, word: str) -> str:
    """Return one candidate a line, without the part of the word that bash does not replace."""
    words = list(matches)
    if len(words) == 1 and words[0].endswith("="):
        words.append(f"{words[0]}VALUE")  # two candidates: bash adds no space after their common part
    start = max(word.rfind("=") + 1, word.rfind(":") + 1, word.rfind("@"))  # it replaces @ itself, too
    return "\n".join(each[start:] for each in words)


def _zsh(matches: Candidates) -> str:
    """Return commands for zsh: it executes them, so every candidate is plain and every help text is without quotes."""
    if not matches:
        return "_files"
    open_ended = [each for each in matches if each.endswith(("=", "."))]
    whole = [each for each in matches if each not in open_ended]
    lines = []
    for group, option in ((whole, ""), (open_ended, " -S ''")):
        if group:
            described = " ".join(f"'{_described(each, matches[each])}'" for each in group)
            lines.append(f"local -a found; found=({described}); _describe ddptrain found{option};")
    return " ".join(lines)


def _described(word: str, text: str) -> str:
    escaped = word.replace(":", "\\:")
    return f"{escaped}:{_short(text)}" if text else escaped


def _short(text: str) -> str:
    line = " ".join(text.split()).translate(_HELP_CHARACTERS)
    return line if len(line) <= _HELP_LENGTH else f"{line[: _HELP_LENGTH - 3]}..."
