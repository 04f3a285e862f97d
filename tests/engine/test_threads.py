"""Who steps back for whom where everything shares a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from engine.threads import SteppedBack

linux = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux has a thread a priority of its own")


def priority():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_a_thread(function):
    """What a thread that this one starts sees: OpenMP's threads are started by the first pass."""
    seen = []
    thread = threading.Thread(target=lambda: seen.append(function()))
    thread.start()
    thread.join()
    return seen[0]


@linux
def test_prefill_steps_back_and_nobody_else_does():
    """Without it a burst of documents is embedded at the pace that prefill leaves."""
    before, back = priority(), SteppedBack(1)
    if before >= 19:
        pytest.skip("this process has the lowest priority already")
    assert back.call(priority) == before + 1
    assert back.call(in_a_thread, priority) == before + 1
    assert (priority(), in_a_thread(priority)) == (before, before)


def test_a_call_gives_and_raises_what_the_function_does():
    for nice in (0, 1):
        back = SteppedBack(nice)
        assert back.call(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            back.call(divmod, 1, 0)


@pytest.mark.parametrize(("given", "seen"), [(None, "passive"), ("active", "active")])
def test_the_command_line_lets_openmp_wait_asleep_before_torch_is_loaded(given, seen):
    """Threads that spin for a core that another pass has make both many times slower; torch reads it when it loads."""
    script = (
        "import sys, os, kvquilt\n"
        "sys.argv = ['kvquilt', '--help']\n"
        "try: kvquilt.main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules\n"
        "print(os.environ['OMP_WAIT_POLICY'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == seen
