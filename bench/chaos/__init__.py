"""Chaos: random schedules of changes and faults against real processes, and an audit of everything afterwards.

    python -m bench.chaos --runs 20 --seed 1 --json

`audit` and `truth` say what must hold, whoever ran the schedule: the model-level schedules of the fast suite
(tests/ingest/test_schedules.py) are judged by the same code.
"""
