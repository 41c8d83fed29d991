"""What `train.py RECIPE --plan` answers, called in the process of a test."""

import contextlib
import io
import json
from typing import Any

import pytest

from parallel.errors import UserError
from recipes.lab.plan import command


def printed(*arguments: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert command.answer([*arguments, "--plan"]) == 0
    return out.getvalue()


def numbers(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(printed(*arguments, "--json"))
    return answer


def refused(*arguments: str) -> str:
    with pytest.raises(UserError) as error:
        command.answer([*arguments, "--plan"])
    return str(error.value)
