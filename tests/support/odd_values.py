"""JSON values with something in them that nobody means."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

HUGE = "9" * 5000
DEEP = "[" * 100_000 + "]" * 100_000
NESTED = "900 lists, one in the other"
ANYTHING: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 1.5, 1e12, 1e308, 5e-324, 10**12, 10**400, float("nan"), float("inf")),
    *("", "x", "0", "0F0", "\ud800", "x\n" * 2500, HUGE, HUGE + "F0", NESTED),
    *([], {}, [[]], [1], [[0, 1], [1, 0]], [[0] * 3] * 3, {"a": 1}, {"x" * 5000: 1, "\ud800": 2}),
]


def as_json(body: Any) -> str:
    return json.dumps(body).replace(f'"{NESTED}"', "[" * 900 + "]" * 900)


def _places(body: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    for key in body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ():
        yield body, key
        yield from _places(body[key])


def _filled(body: Any, value: Any) -> Any:
    """A JSON value with one value in the place of each of its numbers."""
    if isinstance(body, dict):
        return {key: _filled(each, value) for key, each in body.items()}
    if isinstance(body, list):
        return [_filled(each, value) for each in body]
    return body if isinstance(body, str) else value


def changed(body: Any, random: Random) -> Any:
    """A JSON value with up to three of its values replaced, filled, dropped or doubled."""
    body = copy.deepcopy(body)
    for _ in range(random.randint(1, 3)):
        all_places = list(_places(body))
        if not all_places:
            return body
        # Half of the time one of the first keys, which the many ops would hide.
        container, key = random.choice(
            all_places
            if random.random() < 0.5
            else all_places[:1] + [place for place in all_places if isinstance(place[0], dict) or len(place[0]) < 5]
        )
        kind = random.random()
        if kind < 0.7:
            container[key] = copy.deepcopy(random.choice(ANYTHING))
        elif kind < 0.8:
            container[key] = _filled(container[key], random.choice([0, 5e-324, 1e308, 10**400]))
        elif kind < 0.9 or isinstance(container, dict):
            del container[key]
        else:
            container.append(container[key])
    return body
