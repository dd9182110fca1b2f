"""The base class and the field types of the configuration models."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ddptrain.config.wording import describe_value

MODULE_PATTERN = r"^[^\W\d]\w*(\.[^\W\d]\w*)*$"
TARGET_PATTERN = r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$"
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
# Longer waits overflow timedelta and poll().
_A_YEAR_S = 31_536_000
MOST_RANKS = 65_536
_LAST_PORT = 65_535
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")


def wrong_field(field: str, message: str, hint: str) -> PydanticCustomError:
    """Return the error of a check over several fields; `field` is the dotted key, below the model, of the wrong one."""
    return PydanticCustomError("wrong_field", "{message}", {"field": field, "message": message, "hint": hint})


def slug(text: str) -> str:
    """Convert `text` to a valid run name; "" if no character remains."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).lstrip("._-")[:64].rstrip("-")


def default_name(workload: str, stem: str = "") -> str:
    """Return the default name of a run: the built-in workload, the stem of the file, or the function."""
    module, _, function = workload.rpartition(":")
    return slug(stem if module and slug(stem) else function) or "run"


def off_word(value: object) -> object:
    """Convert false, which is `off` in YAML 1.1, to "off"."""
    return "off" if value is False else value


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a NUL character, which is not allowed")
    return text


def _one_line(text: str) -> str:
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise ValueError("contains a line break or another control character")
    return text


def _variable_name(name: str) -> str:
    if not name or "=" in name:
        raise ValueError('is not a name of an environment variable: it is empty or contains "="')
    return _without_nul(name)


def duration_s(text: str) -> float:
    """Convert a duration such as "30d", "6h", "90m" or "1h30m" to seconds. Raises ValueError."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text.replace(" ", ""):
        raise ValueError(
            f'{describe_value(text)} is not a duration: write a number with s, m, h, d or w, as in "6h" or "1h30m"'
        )
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def _as_seconds(value: object) -> object:
    return duration_s(value) if isinstance(value, str) else value


def is_scheduler_file(address: str) -> bool:
    """Return whether an address is the path of a file that `dask scheduler --scheduler-file` wrote."""
    return "://" not in address and ("/" in address or address.endswith(".json"))


def _scheduler_address(text: str) -> str:
    if is_scheduler_file(text):
        return text
    tcp = r"((tcp|tls|ws|wss|ucx)://)?([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}"
    if not re.fullmatch(tcp, text):
        raise ValueError("is not a scheduler's address: expected something like tcp://host:8786")
    if not 1 <= int(text.rpartition(":")[2]) <= _LAST_PORT:
        raise ValueError(f"has a wrong port: expected one from 1 to {_LAST_PORT}")
    return text


def _as_word(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


SystemText = Annotated[str, AfterValidator(_without_nul)]
# An argument of a command: a number is converted to text.
Word = Annotated[SystemText, BeforeValidator(_as_word, json_schema_input_type=str | int | float)]
# The length is checked first, so that the error mentions characters.
FilledText = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]
Line = Annotated[str, Field(min_length=1), AfterValidator(_one_line)]
VariableName = Annotated[str, AfterValidator(_variable_name)]
SchedulerAddress = Annotated[str, AfterValidator(_without_nul), AfterValidator(_scheduler_address)]
Seconds = Annotated[float, Field(le=_A_YEAR_S)]
# Seconds, or a text such as "6h".
Duration = Annotated[Seconds, BeforeValidator(_as_seconds, json_schema_input_type=float | str)]
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]


class Strict(BaseModel):
    """Base of the sections: frozen, without unknown keys and type conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, serialize_by_alias=True)
