"""Loops in the comparison of compiled programs: equal whatever the order of what no turn changes."""

from __future__ import annotations

import pytest
from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

from perdure.distribute.jax.fused import hlo

# Turn: `h = tanh(h * w) + b`, where no turn changes w and b. The inner loop adds w to h.
PROGRAM = """HloModule m

%more (m: (s32[], f32[4], f32[4], f32[4])) -> pred[] {{
  %m = (s32[], f32[4]{{0}}, f32[4]{{0}}, f32[4]{{0}}) parameter(0)
  %i.0 = s32[] get-tuple-element(%m), index=0
  %limit = s32[] constant({turns})
  ROOT %lt = pred[] compare(%i.0, %limit), direction=LT
}}

%add_turn (a: (s32[], f32[4], f32[4])) -> (s32[], f32[4], f32[4]) {{
  %a = (s32[], f32[4]{{0}}, f32[4]{{0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%a), index=0
  %h.1 = f32[4]{{0}} get-tuple-element(%a), index=1
  %k.1 = f32[4]{{0}} get-tuple-element(%a), index=2
  %one.1 = s32[] constant(1)
  %next.1 = s32[] add(%i.1, %one.1)
  %new.1 = f32[4]{{0}} add(%h.1, {addend})
  ROOT %result.1 = (s32[], f32[4]{{0}}, f32[4]{{0}}) tuple(%next.1, %new.1, %k.1)
}}

%add_more (b: (s32[], f32[4], f32[4])) -> pred[] {{
  %b = (s32[], f32[4]{{0}}, f32[4]{{0}}) parameter(0)
  %i.2 = s32[] get-tuple-element(%b), index=0
  %three = s32[] constant(3)
  ROOT %lt.2 = pred[] compare(%i.2, %three), direction=LT
}}

%turn (t: (s32[], f32[4], f32[4], f32[4])) -> (s32[], f32[4], f32[4], f32[4]) {{
  %t = (s32[], f32[4]{{0}}, f32[4]{{0}}, f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %h = f32[4]{{0}} get-tuple-element(%t), index=1
  %w = f32[4]{{0}} get-tuple-element(%t), index={w}
  %b.1 = f32[4]{{0}} get-tuple-element(%t), index={b}
  %one = s32[] constant(1)
  %zero.1 = s32[] constant(0)
  %next = s32[] add(%i, %one)
  %product = f32[4]{{0}} {operation}(%h, %w)
  %start.1 = (s32[], f32[4]{{0}}, f32[4]{{0}}) tuple(%zero.1, %product, {inner})
  %loop.1 = (s32[], f32[4]{{0}}, f32[4]{{0}}) while(%start.1), condition=%add_more, body=%add_turn
  %sum = f32[4]{{0}} get-tuple-element(%loop.1), index=1
  ROOT %result = (s32[], f32[4]{{0}}, f32[4]{{0}}, f32[4]{{0}}) tuple(%next, %sum, {kept})
}}

ENTRY %main (x: f32[4], y: f32[4], z: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  %y = f32[4]{{0}} parameter(1)
  %z = f32[4]{{0}} parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4]{{0}}, f32[4]{{0}}, f32[4]{{0}}) tuple(%zero, %x, {starts})
  %loop = (s32[], f32[4]{{0}}, f32[4]{{0}}, f32[4]{{0}}) while(%start), condition=%more, body=%turn
  ROOT %end = f32[4]{{0}} get-tuple-element(%loop), index={end}
}}
"""
FORWARD = {
    "w": 2, "b": 3, "kept": "%w, %b.1", "starts": "%y, %z", "inner": "%b.1",
    "addend": "%k.1", "operation": "multiply", "turns": 5, "end": 1,
}  # fmt: skip
BACKWARD = {"w": 3, "b": 2, "kept": "%b.1, %w", "starts": "%z, %y"}


class Program:
    """The module of a text in the place of a compiled program."""

    def __init__(self, **changes: object) -> None:
        self._module = _hlo.hlo_module_from_text(PROGRAM.format(**{**FORWARD, **changes}))
        self.text = self._module.to_string()

    def runtime_executable(self) -> Program:
        return self

    def hlo_modules(self) -> list[_hlo.HloModule]:
        return [self._module]


def same(one: Program, other: Program) -> bool:
    return not hlo.difference(one, other, ["x"])


def test_what_no_turn_changes_may_stand_in_any_order() -> None:
    assert Program().text != Program(**BACKWARD).text
    assert same(Program(), Program())
    assert same(Program(), Program(**BACKWARD))
    assert same(Program(end=2), Program(**BACKWARD, end=3)), "both are y"


CHANGES: list[dict[str, object]] = [
    {"starts": "%z, %y"},  # h * z + y
    {"w": 3, "b": 2, "kept": "%b.1, %w"},  # likewise
    {"kept": "%b.1, %w"},  # they change places in every turn
    {"kept": "%w, %w"},
    {"inner": "%w"},
    {"inner": "%product"},
    {"operation": "add"},
    {"turns": 6},
    {"end": 2},
    {"end": 3},
    {"starts": "%x, %z"},
    {"starts": "%y, %y"},
]
OTHERS = [
    program
    for order in ({}, BACKWARD)
    for changes in CHANGES
    if (program := {**FORWARD, **order, **changes}) not in (FORWARD, {**FORWARD, **BACKWARD})
]


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_other_loops_are_other_programs(number: int) -> None:
    other = Program(**OTHERS[number])
    assert not same(Program(), other)
    assert not same(other, Program())


def test_a_variable_of_the_outer_loop_is_none_of_the_inner_one() -> None:
    outer, inner = Program(inner="%h"), Program(inner="%h", addend="%h.1")
    assert not same(outer, inner)
    assert not same(outer, Program())
