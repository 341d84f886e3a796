"""Threads that run one at a time, in an order that a seed decides, by a clock that stands still
while they work.

Every task is a greenlet, which has a stack of its own as a thread has, so the code under test needs
no change. A task runs until it sleeps or waits. The next one is the task that is due first. A
switch between greenlets does not wait for the operating system. Tasks belong to an owner (a
simulated process): the owner may be held up, all its tasks then are, or killed: each of its tasks
gets `Killed` from whatever it was waiting for.

`SimThreading` and `SimQueue` stand in for the modules `threading` and `queue`.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from greenlet import getcurrent, greenlet

FOREVER: Final = float("inf")


class Killed(BaseException):
    """The simulated process has ended. Not an Exception: nothing may handle it and go on."""


class Owner:
    """A simulated process."""

    def __init__(self) -> None:
        self.is_killed = False
        self.held_until = 0.0


class Task:
    def __init__(
        self, schedule: "ThreadSchedule", owner: Owner, work: Callable[[], object]
    ) -> None:
        self.owner = owner
        self.ticket = 0
        """Of its place in the queue; older ones are void."""
        self.held_until = 0.0
        self.is_done = False
        self.waiters: list[Task] = []
        self.handle: SimThread | None = None
        """What the code under test knows it by."""
        self._schedule = schedule
        self._work = work
        self.greenlet = greenlet(self._run, schedule.main)

    def _run(self, _: object = None) -> None:
        """`_`: what the task returned that ended just before this one began."""
        schedule = self._schedule
        try:
            if not self.owner.is_killed:
                self._work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001
            schedule.failures.append(error)
        self.is_done = True
        for waiter in self.waiters:
            schedule.wake(waiter)
        # Where a greenlet goes on that has ended.
        self.greenlet.parent = schedule.next_greenlet()


class ThreadSchedule:
    """`now` is in seconds since the beginning. Ties are broken by the seed."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.failures: list[BaseException] = []
        """Raised by tasks, and not handled by them."""
        self._random = random.Random(seed)
        self._queue: list[tuple[float, float, int, Task]] = []
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self.main = getcurrent()
        """The caller of `run`."""
        self._end = 0.0
        self._tickets = 0

    @property
    def current(self) -> Task:
        assert self._current is not None
        return self._current

    def spawn(self, owner: Owner, work: Callable[[], object]) -> Task:
        task = Task(self, owner, work)
        self._tasks.append(task)
        self._enter(task, self.now)
        return task

    def run(self, until: float) -> None:
        """From outside of all tasks. Raises the first failure of a task."""
        self._end = until
        self._switch()
        self._current = None
        if self.failures:
            raise self.failures[0]

    def close(self) -> None:
        """End all tasks."""
        self._end = FOREVER
        for task in self._tasks:
            task.owner.is_killed = True
            if not task.is_done:
                self._enter(task, self.now)
        self._switch()
        assert all(task.is_done for task in self._tasks)

    # For tasks

    def sleep(self, duration_s: float) -> None:
        task = self.current
        if task.owner.is_killed:
            raise Killed
        due = self.now + duration_s
        if max(task.held_until, task.owner.held_until) <= due <= self._end and (
            not self._queue or due < self._queue[0][0]
        ):
            # Nobody else comes before.
            self.now = due
            return
        self._enter(task, due)
        self._wait(task)

    def block(self, timeout_s: float | None = None) -> None:
        """Until somebody wakes the task, or the time is over."""
        task = self.current
        if task.owner.is_killed:
            raise Killed
        if timeout_s is None:
            task.ticket = 0
        else:
            self._enter(task, self.now + timeout_s)
        self._wait(task)

    def wake(self, task: Task) -> None:
        if not task.is_done:
            self._enter(task, self.now)

    def hold(self, owner: Owner, duration_s: float) -> None:
        """No task of this process runs for that long."""
        owner.held_until = max(owner.held_until, self.now + duration_s)

    def hold_one(self, owner: Owner, duration_s: float) -> None:
        """One of its tasks does not run for that long."""
        tasks = [task for task in self._tasks if task.owner is owner and not task.is_done]
        if tasks:
            self._random.choice(tasks).held_until = self.now + duration_s

    def kill(self, owner: Owner) -> None:
        """Its tasks get `Killed` one after the other; the caller too, if it is one of them, with
        its next wait."""
        owner.is_killed = True
        for task in self._tasks:
            if task.owner is owner and task is not self._current:
                self.wake(task)
        self._tasks = [task for task in self._tasks if not task.is_done]

    def _enter(self, task: Task, due: float) -> None:
        self._tickets += 1
        task.ticket = self._tickets
        heapq.heappush(self._queue, (due, self._random.random(), task.ticket, task))

    def _wait(self, task: Task) -> None:
        self._switch()
        if task.owner.is_killed:
            raise Killed

    def _switch(self) -> None:
        """Give the turn to the next task, and wait for the own one."""
        following = self.next_greenlet()
        if following is not getcurrent():
            following.switch()

    def next_greenlet(self) -> greenlet:
        """Of the task that is due first, or of the caller of `run`. It has the turn."""
        queue = self._queue
        while queue and queue[0][0] <= self._end:
            due, _, ticket, task = heapq.heappop(queue)
            if ticket != task.ticket or task.is_done:
                continue
            due = max(due, self.now)
            held_until = max(task.held_until, task.owner.held_until)
            if held_until > due and not task.owner.is_killed:
                self._enter(task, held_until)
                continue
            self.now = due
            task.ticket = 0
            self._current = task
            return task.greenlet
        if self._end < FOREVER:
            self.now = self._end
        return self.main


class SimEvent:
    def __init__(self, schedule: ThreadSchedule) -> None:
        self._schedule = schedule
        self._is_set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            self._schedule.wake(task)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        schedule = self._schedule
        if not self._is_set:
            task = schedule.current
            self._waiters.append(task)
            schedule.block(timeout)
            if task in self._waiters:
                self._waiters.remove(task)
        elif timeout is not None:
            # A loop that waits on an event that is set must not stop the clock.
            schedule.sleep(1e-6)
        return self._is_set


class SimLock:
    def __init__(self, schedule: ThreadSchedule) -> None:
        self._schedule = schedule
        self._is_taken = False
        self._waiters: deque[Task] = deque()

    def __enter__(self) -> bool:
        while self._is_taken:
            self._waiters.append(self._schedule.current)
            self._schedule.block()
        self._is_taken = True
        return True

    def __exit__(self, *_: object) -> None:
        self._is_taken = False
        if self._waiters:
            self._schedule.wake(self._waiters.popleft())


class SimThread:
    def __init__(
        self,
        schedule: ThreadSchedule,
        target: Callable[[], object],
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self.name = name
        self._schedule = schedule
        self._target = target
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._schedule.spawn(self._schedule.current.owner, self._target)
        self._task.handle = self

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        if task is not None and not task.is_done:
            current = self._schedule.current
            task.waiters.append(current)
            self._schedule.block(timeout)
            if current in task.waiters:
                task.waiters.remove(current)


class SimThreading:
    """What is used of the module `threading`, for tasks of one schedule."""

    def __init__(self, schedule: ThreadSchedule) -> None:
        self._schedule = schedule

    def Event(self) -> SimEvent:
        return SimEvent(self._schedule)

    def Lock(self) -> SimLock:
        return SimLock(self._schedule)

    def Thread(
        self, target: Callable[[], object], name: str = "", daemon: bool = False
    ) -> SimThread:
        return SimThread(self._schedule, target, name, daemon)

    def current_thread(self) -> SimThread | None:
        return self._schedule.current.handle


class SimQueue:
    """Stands in for queue.SimpleQueue."""

    def __init__(self, schedule: ThreadSchedule) -> None:
        self._schedule = schedule
        self._items: deque[Any] = deque()
        self._waiters: deque[Task] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiters:
            self._schedule.wake(self._waiters.popleft())

    def get(self) -> Any:
        while not self._items:
            self._waiters.append(self._schedule.current)
            self._schedule.block()
        return self._items.popleft()
