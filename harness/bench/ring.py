"""Sets of buffers of one shape, each with two contents, so that no answer can be told from an address."""

import copy
from typing import Any

import torch
from torch import Tensor

from ..contract import Contract
from ..layouts import prepared
from ..operation import Inputs, Kernel, Operation
from ..runner import Exam, ExamRoom
from .schedule import Content
from .shapes import Shape

# as much again goes to the copies from which inputs are restored
MOST_BYTES = 30 << 30


class Ring:
    """The inputs that are timed.

    Set ``n`` is drawn from seed ``seed + n``. Its second contents differ in the first floating argument of the
    operation, the queries, which change sign: as random as before, the same work, another answer in every row.
    """

    def __init__(
        self, operation: Operation, shape: Shape, device: torch.device, *, size: int, seed: int, room: ExamRoom
    ) -> None:
        """Draw all sets of buffers; the first is the exam that ``room`` holds, on which kernels were judged.

        Raises:
            MemoryError: If they are larger than ``MOST_BYTES``.
        """
        self.operation, self.shape = operation, shape
        first = room.exam(operation, shape.case(seed), device)
        needed = size * input_bytes(first.inputs)
        if needed > MOST_BYTES:
            raise MemoryError(f"{size} sets of buffers must take at most {MOST_BYTES} bytes, got {needed}")
        self.exams = [first, *(Exam(operation, shape.case(seed + at), device) for at in range(1, size))]
        self.changed = _first_floating(operation, first.inputs)
        self._plain = [exam.inputs.arguments[self.changed].clone() for exam in self.exams]
        self._judged: dict[Content, Exam] = {}
        # set by a kernel that may write its inputs: the next one must not meet what it wrote
        self.restores = False

    def stage(self, content: Content) -> None:
        """Put the contents in place."""
        if self.restores:
            self.exams[content.entry].inputs.ledger.restore()
        target, plain = self.exams[content.entry].inputs.arguments[self.changed], self._plain[content.entry]
        if content.version == 0:
            target.copy_(plain)
        else:
            torch.neg(plain, out=target)

    def exam(self, content: Content) -> Exam:
        """An exam on these contents with its oracle's answer, which is worked out when first asked for.

        Ask before a kernel runs: the oracle must see what was drawn.
        """
        if content not in self._judged:
            self.stage(content)
            view = copy.copy(self.exams[content.entry])
            if content.version:
                # the answer of the set as drawn is not that of other contents
                view.forget()
            # worked out now, while the contents are in place
            view.work_out()
            self._judged[content] = view
        return self._judged[content]


class Slot:
    """One set of buffers as one kernel takes it, bound once."""

    def __init__(self, ring: Ring, entry: int, kernel: Kernel, contract: Contract) -> None:
        """Rearrange the inputs as the kernel wants them and let it do its host's work."""
        exam = ring.exams[entry]
        outline = ring.operation.outline(exam.case)
        self._ring, self._mutates = ring, bool(contract.mutates)
        ring.restores |= self._mutates
        self._given: Inputs = prepared(exam.inputs, kernel, exam.case, contract, outline)
        self._source = exam.inputs.arguments[ring.changed]
        self.run = kernel.bind(self._given.arguments)

    def stage(self, content: Content) -> None:
        """Restore what the kernel may write, and put the contents in place."""
        if self._mutates:
            self._given.ledger.restore()
        self._ring.stage(content)
        mine = self._given.arguments.get(self._ring.changed)
        if isinstance(mine, Tensor) and mine.data_ptr() != self._source.data_ptr():
            mine.copy_(self._source)


def input_bytes(inputs: Inputs) -> int:
    """Of the buffers behind a case, without the copies that they are restored from."""
    return sum(buffer.numel() * buffer.element_size() for buffer in inputs.ledger.buffers.values())


def _first_floating(operation: Operation, inputs: Inputs) -> str:
    for name in operation.arguments:
        value: Any = inputs.arguments.get(name)
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            return name
    raise ValueError(f"{operation.name} must have a floating argument whose contents can change, got none")
