"""Passes of one function over more subjects than one turn of the event loop may visit."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from holdfast.node.node_state import NodeState, Work

SubjectT = TypeVar("SubjectT")


class _Pass(Generic[SubjectT]):
    """The rest of one pass, the next subject at the end."""

    def __init__(
        self,
        subjects: list[SubjectT],
        visit: Callable[[SubjectT], int],
        done: Callable[[], None] | None,
    ) -> None:
        subjects.reverse()
        self.subjects = subjects
        self.visit = visit
        self.done = done


class FunctionWork(Work):
    """A job of which a function makes the slices. A class of a module that is not compiled cannot
    inherit from `Work`."""

    def __init__(self, run: Callable[[NodeState, int], int]) -> None:
        super().__init__()
        self._run = run

    def step(self, state: NodeState, steps: int) -> int:
        """Makes one slice."""
        return self._run(state, steps)


class Sweep(Work, Generic[SubjectT]):
    """The passes over many subjects of one kind, one pass after the other.

    The first slice of a pass runs when it begins. Its bound is `steps_at_once` of the node. So a
    small pass is over at once, and a large one delays no turn.

    Invariant: a subject is visited after the pass began, at some time before its end. Between two
    slices anything may change. So a visit decides by the state at its time whether the subject
    still needs it.
    """

    def __init__(self, state: NodeState) -> None:
        super().__init__()
        self._state = state
        self._passes: deque[_Pass[SubjectT]] = deque()
        self.has_more = False

    def begin(
        self,
        subjects: list[SubjectT],
        visit: Callable[[SubjectT], int],
        done: Callable[[], None] | None = None,
    ) -> None:
        """Visits the subjects in order, then calls `done`. The pass takes the list over. `visit`
        returns the number of steps that it took."""
        self._state.note_list(len(subjects))
        self._passes.append(_Pass(subjects, visit, done))
        if len(self._passes) == 1:
            self.step(self._state, self._state.steps_at_once)
            if self.has_more:
                self._state.start_work(self)

    def step(self, state: NodeState, steps: int) -> int:
        """Visits some subjects."""
        left = steps
        while self._passes and left > 0:
            first = self._passes[0]
            subjects = first.subjects
            while subjects and left > 0:
                left -= first.visit(subjects.pop())
            if not subjects:
                self._passes.popleft()
                left -= 1
                if first.done is not None:
                    first.done()
        self.has_more = bool(self._passes)
        return steps - left
