"""Tasks: LongBench's 21 and those of LongBench-E, GSM8K, generated tasks of their shape, and needles.

Each is listed in one of ``longbench_tasks``, ``gsm8k_tasks``, ``synthetic_tasks`` and ``needle_tasks``.
"""

from .load import Loaded, Loading, all_tasks, find_task, load_task
from .needle import Grid
from .source import DataError, DataSource
from .synthetic import Generation
from .task import REAL, SYNTHETIC, Broken, Sample, Task

__all__ = [
    "REAL",
    "SYNTHETIC",
    "Broken",
    "DataError",
    "DataSource",
    "Generation",
    "Grid",
    "Loaded",
    "Loading",
    "Sample",
    "Task",
    "all_tasks",
    "find_task",
    "load_task",
]
