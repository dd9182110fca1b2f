"""A stand-in for any object, which notes how it is called."""

from __future__ import annotations

from typing import Any


class Notes:
    """Stands for any object: notes the calls of its methods; `returns` has results by method."""

    def __init__(self, notes: list[tuple[Any, ...]], name: str, **returns: Any) -> None:
        self._notes, self._name, self._returns = notes, name, returns

    def __getattr__(self, method: str) -> Any:
        if method in self._returns and not callable(self._returns[method]):
            return self._returns[method]

        def call(*arguments: Any, **options: Any) -> Any:
            self._notes.append((f"{self._name}.{method}", *arguments, *([options] if options else [])))
            given = self._returns.get(method)
            return given(*arguments) if given is not None else None

        return call


def noted(notes: list[Any], note: Any, answer: Any = None) -> Any:
    """Append a note and return the answer: what a lambda needs to stand for a function."""
    notes.append(note)
    return answer
