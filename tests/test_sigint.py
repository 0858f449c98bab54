"""SIGINT on an engine: it interrupts the work of a request, but never its reply."""

from __future__ import annotations

import os
import signal

import pytest

from dtkit.engine.comm.sigint import SigintHandler


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_sigint_interrupts_the_work_of_a_request():
    with pytest.raises(KeyboardInterrupt), SigintHandler().handle_during_request():
        interrupt()


def test_sigint_is_ignored_after_the_work_is_done():
    interrupts, before = SigintHandler(), signal.getsignal(signal.SIGINT)
    with interrupts.handle_during_request():
        interrupts.work_done = True
        interrupt()
    assert signal.getsignal(signal.SIGINT) is before
    with (
        pytest.raises(KeyboardInterrupt),
        interrupts.handle_during_request(),
    ):  # and the next request can be interrupted again
        interrupt()
