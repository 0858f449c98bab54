"""SIGINT on an engine: it ends the work of a request, never the making of its reply."""

from __future__ import annotations

import os
import signal

import pytest

from dtkit.engine.comm.sigint import SigintHandler


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_what_is_being_done():
    with pytest.raises(KeyboardInterrupt), SigintHandler().handle_during_request():
        interrupt()


def test_an_interrupt_is_no_more_once_the_work_is_done():
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
