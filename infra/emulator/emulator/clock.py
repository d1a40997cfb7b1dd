"""Time in the emulated cloud. It runs with the machine's clock until a test sets it; from then on it stands until set again.

What happens by itself (a schedule fires, an instance is gone) is an event of a source. When time moves, events happen one
after another, each at its own time, so that an event which causes another one within the same step is seen to.
"""

import datetime
import time


class Clock:
    def __init__(self, start=None):
        self._set = start
        self._replayed = None
        self.sources = []  # each has due(until) -> [(at, act)]

    def now(self):
        """Seconds since 1970."""
        if self._replayed is not None:
            return self._replayed
        return time.time() if self._set is None else self._set

    def utcnow(self):
        """As moto keeps its times: naive, in UTC."""
        return datetime.datetime.fromtimestamp(self.now(), datetime.UTC).replace(tzinfo=None)

    def set(self, to):
        if to < self.now():
            raise ValueError(f"the cloud's clock does not go back: it is {self.now()} and was to become {to}")
        self._happen(to)
        self._set = to

    def tick(self):
        self._happen(self.now())

    def _happen(self, until):
        try:
            while due := [event for source in self.sources for event in source.due(until)]:
                at, act = min(due, key=lambda event: event[0])
                self._replayed = max(at, self._replayed or 0)
                act()
        finally:
            self._replayed = None
