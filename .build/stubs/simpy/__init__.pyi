# What the compiled modules use of SimPy: that it is not installed where they are compiled may change nothing.
from typing import Any

class Event:
    callbacks: Any
    def __init__(self, env: Environment) -> None: ...

class Environment:
    _queue: Any
    _eid: Any
    def __init__(self, initial_time: float = 0) -> None: ...
