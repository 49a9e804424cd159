"""Comparison of optimized XLA programs by their text.

Two programs that are called equal make their results by the same instructions of the same values. A
text that is not understood is equal to no other.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import re
from contextlib import suppress
from typing import Any

# Attributes that do not change what an instruction computes: its origin, and shardings, which have been
# applied by the time the program is optimized.
_ATTRIBUTES = re.compile(
    r", (?:metadata|sharding|frontend_attributes)="
    r'\{(?:"(?:[^"\\\n]|\\.)*"|[^{}"\n]|\{(?:"(?:[^"\\\n]|\\.)*"|[^{}"\n])*\})*\}'
)
_NAME = re.compile(r"%[\w.\-]+")
_HEAD = re.compile(r"^(ENTRY )?(%[\w.\-]+) .*$", re.MULTILINE)
_CALL = re.compile(r" call\((.*)\), to_apply=(%[\w.\-]+)")
_COPY = re.compile(r"^(\S+) copy\((%[\w.\-]+)\)")
_WHILE = re.compile(r" while\((%[\w.\-]+)\), condition=(%[\w.\-]+), body=(%[\w.\-]+)(.*)$")
# Raised by reading if another release of XLA prints its programs in another way.
_NOT_UNDERSTOOD = (KeyError, ValueError, IndexError, AttributeError, ImportError, TypeError)
_ELIDED = "constant({...})"
_PART = re.compile(r" get-tuple-element\((%[\w.\-]+)\), index=(\d+)")


def same_program(one: Any, other: Any) -> bool:
    """Whether two compiled programs make their results by the same instructions of the same values."""
    with suppress(*_NOT_UNDERSTOOD):
        return _HloModule(_text(one)).entry.result == _HloModule(_text(other)).entry.result
    return False


def is_grad_then_update(whole: Any, grad: Any, update: Any, between: bool) -> bool:
    """Whether a program computes `grad`, then `update` of the state and what `grad` gave.

    All three take the state first. In `whole` the update is a computation of its own, called last; with
    `between` it gets what another one, called before it, makes of the results of `grad`.
    """
    with suppress(*_NOT_UNDERSTOOD):
        return _is_grad_then_update(whole, grad, update, between)
    return False


def _is_grad_then_update(whole: Any, grad: Any, update: Any, between: bool) -> bool:
    module = _HloModule(_text(whole), open_calls=True)
    alone, last = _HloModule(_text(grad)).entry, _HloModule(_text(update)).entry
    calls = module.entry.calls
    if len(calls) != 1 + between or module.called(calls[-1].target).leaves != last.leaves:
        return False
    contributions = alone.leaves
    if between:
        if calls[0].operands != contributions:
            return False
        contributions = calls[0].parts(len(contributions))
    state = last.parameters[: len(last.parameters) - len(contributions)]
    return calls[-1].operands == state + contributions and module.entry.leaves == calls[-1].parts(
        len(last.leaves)
    )


def _text(program: Any) -> str:
    """The text of an optimized program, with every element of every constant.

    By default XLA prints `constant({...})` for more than ten elements, so that two programs with
    different tables look alike. Floats are printed so that they read back to the same bits.
    """
    text = program.as_text()
    if _ELIDED in text:
        module = importlib.import_module("jaxlib._hlo")
        options = module.HloPrintOptions()
        options.print_large_constants = True
        (computed,) = program.runtime_executable().hlo_modules()
        text = computed.to_string(options)
    if _ELIDED in text:
        raise ValueError("XLA leaves elements of a constant out of the text of a program")
    return text


class _HloModule:
    """The computations of an optimized module, with hashes of their contents in place of all names.

    The module's header is left out: it has the module's name and the number of devices. A computation
    that the entry or a called computation applies is one kernel, whose instructions count in their
    order; their own instructions are kernels, of which only the operands count, and so are those of a
    loop in them.
    """

    def __init__(self, text: str, *, open_calls: bool = False) -> None:
        self.kernels: dict[str, str] = {}
        self._lines: dict[str, list[str]] = {}
        for block in re.split(r"^\}$", text, flags=re.MULTILINE):
            if not (head := _HEAD.search(block)):
                continue
            lines = _ATTRIBUTES.sub("", block[head.end() :]).strip().split("\n")
            if head[1]:
                self.entry = _Computation(lines, self, open_calls=open_calls)
                return
            names: dict[str, str] = {}

            def canonical(name: re.Match[str], names: dict[str, str] = names) -> str:
                return self.kernels.get(name[0]) or names.setdefault(name[0], f"%{len(names)}")

            self._lines[head[2]] = lines
            self.kernels[head[2]] = _hash(_NAME.sub(canonical, "\n".join(lines)))
        raise ValueError("a compiled program shows no entry computation")

    def called(self, name: str) -> _Computation:
        return _Computation(self._lines[name], self)

    def loop(self, start: list[str], text: re.Match[str], depth: int) -> list[str]:
        """The elements that a loop ends with, if it begins with the elements `start`.

        An element that no turn changes is its start, in the loop and after it. The others are numbered
        without those: where they stand in the tuple depends on the order of the passes of the compiler.
        """

        def after(name: str, elements: list[str]) -> _Computation:
            return _Computation(self._lines[name], self, elements=elements, depth=depth + 1)

        unknown = [f"element {index} at depth {depth}" for index in range(len(start))]
        kept = [a == b for a, b in zip(unknown, after(text[3], unknown).leaves, strict=True)]
        number = itertools.count()
        elements = [
            value if same else f"variable {next(number)} at depth {depth}"
            for value, same in zip(start, kept, strict=True)
        ]
        turn, more = after(text[3], elements).leaves, after(text[2], elements).result
        changed = [n for n, same in enumerate(kept) if not same]
        begins, ends = ([values[n] for n in changed] for values in (start, turn))
        whole = _hash(f"while {begins} {ends} {more} {text[4]}")
        return [
            value if same else f"{whole} {element}"
            for value, same, element in zip(start, kept, elements, strict=True)
        ]


class _Call:
    """A call of a computation that was not inlined: its operands, and names for its results."""

    def __init__(self, number: int, operands: list[str], target: str) -> None:
        self.operands = operands
        self.target = target
        self._number = number

    def parts(self, count: int) -> list[str]:
        return [self.part(index) for index in range(count)]

    def part(self, index: int) -> str:
        return f"call {self._number} result {index}"


class _Computation:
    """Values by hashes of how they are made; instructions come after their operands.

    With `open_calls` the results of a call have names of their own, and the call is in `calls`.
    `elements` are those of the parameter of a loop's body or condition, `depth` the number of loops
    around its instructions.
    """

    def __init__(
        self,
        lines: list[str],
        module: _HloModule,
        *,
        open_calls: bool = False,
        elements: list[str] | None = None,
        depth: int = 0,
    ) -> None:
        made, calls = dict(module.kernels), dict[str, _Call]()
        parameters: dict[int, str] = {}
        tuples: dict[str, list[str]] = {}
        parts: dict[str, list[str]] = {}
        types: dict[str, str] = {}
        self.result, self.leaves = "", list[str]()
        for line in lines:
            name, _, text = line.strip().removeprefix("ROOT ").partition(" = ")
            part, copy = _PART.search(text), _COPY.match(text)
            types[name] = text.partition(" ")[0]
            if open_calls and (call := _CALL.search(text)):
                operands = [made[operand] for operand in _NAME.findall(call[1])]
                calls[name] = _Call(len(calls), operands, call[2])
                made[name] = calls[name].part(0)  # of one result that is no tuple
                if text.startswith("("):
                    count = text[: text.index(") call(")].count("[")
                    tuples[name] = calls[name].parts(count)
            elif part and part[1] in calls:
                made[name] = calls[part[1]].part(int(part[2]))
            elif part and part[1] in parts:
                made[name] = parts[part[1]][int(part[2])]
            elif (loop := _WHILE.search(text)) and loop[1] in tuples:
                tuples[name] = parts[name] = module.loop(tuples[loop[1]], loop, depth)
                made[name] = _hash(f"tuple {parts[name]}")
            elif elements is not None and " parameter(0)" in text:
                tuples[name] = parts[name] = elements
                made[name] = _hash(f"tuple {elements}")
            elif copy and types[copy[2]] == copy[1]:
                made[name] = made[copy[2]]  # in the same layout: the same bytes elsewhere
            else:
                if number := re.search(r" parameter\((\d+)\)", text):
                    # A parameter's layout is that of the program's arguments: always the plain one.
                    parameters[int(number[1])] = _hash(text)
                made[name] = _hash(_NAME.sub(lambda operand: made[operand[0]], text))
                if (start := text.find(") tuple(")) >= 0:
                    tuples[name] = [made[operand] for operand in _NAME.findall(text[start:])]
            if line.lstrip().startswith("ROOT "):
                self.result = made[name]
                self.leaves = tuples.get(name) or [made[name]]
        self.parameters = [parameters[number] for number in sorted(parameters)]
        self.calls = list(calls.values())


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
