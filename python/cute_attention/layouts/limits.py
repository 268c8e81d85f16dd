"""Proofs about room: the shared-memory plan, accumulator registers, occupancy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from cute_attention.layouts.hardware import CHIPS
from cute_attention.layouts.model import Kernel, table
from cute_attention.layouts.result import Result
from cute_attention.layouts.trace import parts_of

SMALL_CHIP = 99 * 1024  # bytes that a CTA may have at compute capability 8.6, 8.9 and 12.0


def check_limits(kernel: Kernel) -> Iterator[Result]:
    """The rules `plan`, `registers` and `occupancy`."""
    yield from _check_plan(kernel)
    for role in kernel.roles:
        if role["together"]:
            used = registers(kernel, role)
            number = f"at least {used} of {role['registers']} a thread: accumulators and operands"
            yield Result("registers", role["name"], used <= role["registers"], number)
    if any(role["fixed"] for role in kernel.roles):
        yield _registers_at_launch(kernel)
    yield _occupancy(kernel)


def _registers_at_launch(kernel: Kernel) -> Result:
    """Whether setmaxnreg gives no more registers than the CTA has: a warpgroup waits for ever for
    one that nobody has. At launch each thread has an equal share, a multiple of 8 (PTX ISA,
    "setmaxnreg")."""
    asked = sum(role["registers"] * role["threads"] for role in kernel.roles)
    owned = CHIPS[kernel.row.arch].registers // kernel.threads // 8 * 8 * kernel.threads
    number = f"setmaxnreg gives {asked} of the {owned} registers that a CTA has at launch"
    return Result("registers", "all roles", asked <= owned, number)


def _check_plan(kernel: Kernel) -> Iterator[Result]:
    plan = kernel.plan
    for first, second in combinations(plan["buffers"], 2):
        begin = max(first["offset"], second["offset"])
        end = min(first["offset"] + first["bytes"], second["offset"] + second["bytes"])
        if begin >= end:
            continue
        apart = first["last"] < second["first"] or second["last"] < first["first"]
        phases = plan["phases"]
        lives = [
            f"{buffer['name']} from '{phases[buffer['first']]}' to '{phases[buffer['last']]}'"
            for buffer in (first, second)
        ]
        name = f"{first['name']} and {second['name']} overlap"
        yield Result("plan", name, apart, f"{end - begin} bytes: {', '.join(lives)}")
    misplaced = [
        buffer["name"]
        for buffer in plan["buffers"]
        if buffer["offset"] % buffer["needs_alignment"] or buffer["offset"] < 0
    ]
    widest = max(buffer["needs_alignment"] for buffer in plan["buffers"])
    number = f"{len(plan['buffers'])} buffers aligned to what they need, at most {widest} bytes"
    if misplaced:
        number = f"not aligned to what they need: {', '.join(misplaced)}"
    yield Result("alignment", "buffers", not misplaced, number)
    limit = CHIPS[kernel.row.arch].cta_shared_memory
    small = "fits" if plan["bytes"] <= SMALL_CHIP else "does not fit"
    number = f"{plan['bytes']} of {limit} bytes"
    if kernel.row.arch == "sm80":
        number += f"; {small} the {SMALL_CHIP} bytes of 8.6, 8.9 and 12.0"
    yield Result("plan", "shared memory", plan["bytes"] <= limit, number)


def _count(layout: dict[str, Any]) -> int:
    return int(np.unique(table(layout)).size)


def _operand_registers(product: dict[str, Any]) -> int:
    """A lower bound of the 32-bit registers that a product's operands take: those of one MMA for an
    operand from shared memory, all registers for one that was an accumulator."""
    total = 0
    for side in "ab":
        operand = parts_of(product)[0][side]
        if operand["from"] == "registers":
            total += _count(operand["fragment"]) // 2
        elif operand["from"] == "shared":
            total += table(operand["fragment"]).shape[0] // 2
    return total


def registers(kernel: Kernel, role: dict[str, Any]) -> int:
    """A lower bound of the registers that a thread needs: the most that its accumulators and
    operands take at the same time."""
    most = 0
    for names in role["together"]:  # accumulators alive together, the last being computed
        product = kernel.product(names[-1])
        accumulators = sum(_count(kernel.product(name)["c"]["registers"]) for name in names)
        most = max(most, accumulators + _operand_registers(product))
    return most


def registers_left(kernel: Kernel) -> int | None:
    """What a thread has beside its accumulators and operands: the fewest of all roles whose
    registers are fixed, by setmaxnreg. None where the compiler may take as many as it likes."""
    left = [
        role["registers"] - registers(kernel, role)
        for role in kernel.roles
        if role["fixed"] and role["together"]
    ]
    return min(left, default=None)


@dataclass(frozen=True)
class Occupancy:
    """How many CTAs each resource of an SM has room for."""

    shared_memory: int
    threads: int
    registers: int

    @property
    def ctas(self) -> int:
        """How many CTAs the scarcest resource has room for."""
        return min(self.shared_memory, self.threads, self.registers)


def occupancy(kernel: Kernel) -> Occupancy:
    """How many CTAs an SM has room for. A thread takes the registers that setmaxnreg gives it;
    without setmaxnreg at least those of its accumulators and operands, rounded up to a multiple of
    8."""
    chip = CHIPS[kernel.row.arch]
    used = 0
    for role in kernel.roles:
        need = registers(kernel, role) if role["together"] else 0
        each = role["registers"] if role["fixed"] else -(-max(need, 32) // 8) * 8
        used += each * role["threads"]
    return Occupancy(
        chip.shared_memory // (kernel.plan["bytes"] + 1024),
        min(chip.threads // kernel.threads, chip.ctas),
        chip.registers // used,
    )


def _occupancy(kernel: Kernel) -> Result:
    room = occupancy(kernel)
    number = (
        f"{room.ctas} CTAs ({room.ctas * kernel.row.warps} warps) on an SM; shared memory has room "
        f"for {room.shared_memory}, threads {room.threads}, registers at most {room.registers}"
    )
    return Result("occupancy", CHIPS[kernel.row.arch].name, room.ctas >= 1, number)
