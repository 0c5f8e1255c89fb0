"""Walking, capturing and giving again what tensors live in."""

import collections
import random
import types
import weakref
from dataclasses import dataclass, field

import numpy
import pytest
import torch
from torch import nn

from blockhooks.structure import Slots, capture, contents_of, is_rng, tensors_in
from blockhooks.survey import survey
from tests.agree import describe, differs

Point = collections.namedtuple("Point", "x y")


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("items", "missing", "name")

    def __init__(self, items):
        self.items, self.name = items, "slotted"


@dataclass
class Data:
    items: list = field(default_factory=list)


class OwnDict(dict):
    pass


class OwnList(list):
    pass


def values():
    return {
        "list": [1, [2, {"three": 3}]],
        "dict": {"a": [1], "b": {"c": (1, [2])}},
        "tuple": (1, [2], {"three": 3}),
        "set": {1, 2, 3},
        "deque": collections.deque([1, 2], maxlen=3),
        "defaultdict": collections.defaultdict(list, a=[1]),
        "OrderedDict": collections.OrderedDict(a=[1], b=2),
        "Counter": collections.Counter("abca"),
        "namedtuple": Point([1], 2),
        "object": Plain(a=[1], b=Plain(c=2)),
        "slots": Slotted([1, 2]),
        "dataclass": Data([1, 2]),
        "SimpleNamespace": types.SimpleNamespace(a=[1], b=types.SimpleNamespace(c=2)),
        "own dict": OwnDict(a=[1]),
        "own list": OwnList([1, [2]]),
        "array": numpy.arange(4.0),
        "array of objects": numpy.array([1, "two"], dtype=object),
        "bytearray": bytearray(b"abc"),
    }


def spoil(value):
    """Change a value in place, as deep as can be."""
    if isinstance(value, (numpy.ndarray, bytearray)):
        value[0] = 77
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value["spoilt"] = 1
    elif isinstance(value, (list, collections.deque)):
        for item in value:
            spoil(item)
        value.append("spoilt")
    elif isinstance(value, tuple):
        for item in value:
            spoil(item)
    elif isinstance(value, set):
        value.add("spoilt")
    elif isinstance(value, Slotted):
        spoil(value.items)
        value.name = "spoilt"
        value.missing = 1
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            spoil(item)
        value.spoilt = 1


KINDS = list(values())


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_captured_is_given_again(kind):
    value = values()[kind]
    captured = capture(value)
    assert captured.same(value)
    assert not captured.constant
    spoil(value)
    assert not captured.same(value)
    again = captured.rebuild()
    assert type(again) is type(value)
    assert differs(describe(again), describe(values()[kind])) is None
    spoil(again)
    assert differs(describe(captured.rebuild()), describe(values()[kind])) is None, (
        "each is a new copy"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_contents_are_put_back_into_the_very_objects(kind):
    value = values()[kind]
    contents = contents_of(value)
    spoil(value)
    contents.put_back()
    assert differs(describe(value), describe(values()[kind])) is None


@pytest.mark.parametrize("kind", ["object", "dataclass", "array"])
def test_an_unchanged_object_is_given_itself(kind):
    value = values()[kind]
    assert capture(value).rebuild() is value


@pytest.mark.parametrize(
    "value",
    [1, "text", None, torch.float32, print, nn.Linear(2, 2), random.Random(1), (1, "two")],
    ids=["int", "str", "None", "dtype", "builtin", "module", "generator", "tuple"],
)
def test_constants_are_given_as_they_are(value):
    captured = capture(value)
    assert captured.constant
    assert captured.rebuild() is value


def test_shared_containers_stay_shared():
    shared = [1]
    captured = capture({"a": shared, "b": (shared, Plain(c=shared))})
    shared.append(2)
    again = captured.rebuild()
    assert again["a"] is again["b"][0]
    assert again["b"][1].c is again["a"]
    assert again["a"] == [1]


def test_containers_that_reach_themselves():
    ring = [1]
    ring.append(ring)
    owner = Plain(name="owner")
    owner.self = owner
    captured = capture([ring, owner])
    assert captured.same([ring, owner])
    owner.name = "changed"
    ring[0] = 2
    again_ring, again_owner = captured.rebuild()
    assert again_ring[1] is again_ring
    assert again_ring[0] == 1
    assert again_owner.self is again_owner
    assert again_owner.name == "owner"


def test_tensors_are_taken_out_once_and_replaced():
    one, two = torch.ones(2), torch.zeros(2)
    value = {"a": [one, two], "b": Plain(c=one)}
    captured = capture(value, take_tensors=True)
    assert [t is u for t, u in zip(captured.tensors, (one, two), strict=True)] == [True, True]
    three, four = torch.full((2,), 3.0), torch.full((2,), 4.0)
    again = captured.rebuild([three, four])
    assert again["a"][0] is three
    assert again["a"][1] is four
    assert again["b"].c is three
    assert value["b"].c is one, "the user's own object is left alone"
    assert captured.rebuild([one, two])["b"] is value["b"]


def test_tensors_stay_where_they_are_unless_taken():
    tensor = torch.ones(2)
    assert capture([tensor]).rebuild()[0] is tensor
    assert tensors_in({"a": [tensor, (tensor, 3)], "b": Plain(c=tensor)}) == [tensor]


def test_an_object_that_was_captured_is_not_kept_alive():
    value = Plain(a=1)
    reference = weakref.ref(value)
    captured = capture([value])
    del value
    assert reference() is None
    assert captured.rebuild()[0].a == 1


def test_objects_with_builtin_bases_are_left_as_they_are():
    class Level(int):
        pass

    class Text(str):
        __slots__ = ()

    level = Level(3)
    level.note = [1]
    for value in (level, Text("text"), ValueError("error"), open):
        assert capture([value]).rebuild()[0] is value


def test_slots_as_a_dict():
    owner = Slotted([1])
    slots = Slots(owner)
    assert dict(slots) == {"items": [1], "name": "slotted"}
    assert "missing" not in slots
    slots["missing"] = 3
    assert owner.missing == 3
    del slots["missing"]
    assert len(slots) == 2
    with pytest.raises(KeyError, match="missing"):
        slots["missing"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.Generator(), True),
        (random.Random(), True),
        (numpy.random.default_rng(), True),
        (numpy.random.RandomState(), True),
        (random.SystemRandom(), True),
        (torch.ones(1), False),
        (random, False),
        (3, False),
    ],
    ids=[
        "Generator",
        "Random",
        "numpy Generator",
        "RandomState",
        "SystemRandom",
        "tensor",
        "module",
        "number",
    ],
)
def test_is_rng(value, expected):
    assert is_rng(value) is expected


def test_a_survey_finds_modules_objects_hooks_and_generators():
    class Hook:
        def __init__(self):
            self.calls = 0

        def __call__(self, module, args, output):
            self.calls += 1

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
            self.hidden = [nn.Linear(2, 2)]
            self.rng = torch.Generator()

    class Callable:
        def __init__(self):
            self.rng = {"deep": random.Random()}
            self.linear = nn.Linear(2, 2)

        def __call__(self, x):
            return x

    block, called, side, closed, hook = (
        Block(),
        Callable(),
        numpy.random.default_rng(),
        torch.Generator(),
        Hook(),
    )
    block.inner.register_forward_hook(hook)
    found = survey([block, called, lambda x: torch.rand(2, generator=closed), block], [[side]])
    assert set(found.modules) == {block, block.inner, *block.inner, block.hidden[0], called.linear}
    assert len(found.modules) == 6
    assert found.objects == [called]
    assert found.hooks == [hook]
    assert set(map(id, found.rngs)) == set(map(id, (block.rng, called.rng["deep"], closed, side)))
