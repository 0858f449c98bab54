"""torch's optimizers without its compiler, each time in a fresh process, since an import can't be undone."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_PRELUDE = """
import sys
import torch
from dtkit._util.lazy_compiler import defer_compiler, load_compiler
def make(kind, **options):
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    p.grad = torch.tensor([0.5, 3.0], dtype=torch.float64)
    return kind([p], lr=0.1, **options)
def read(optimizer):
    return optimizer.param_groups[0]["params"][0].tolist()
def is_loaded():
    return "torch._dynamo" in sys.modules
"""


def _run(code: str) -> str:
    """Return what the code prints."""
    program = _PRELUDE + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


KINDS = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"]


def test_optimizers_update_as_torchs_own_without_loading_the_compiler():
    """The same optimizers again, after the compiler was loaded, are torch's own."""
    code = f"""
    defer_compiler()
    def train():
        results = []
        for name in {KINDS}:
            optimizer = make(getattr(torch.optim, name))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            optimizer.add_param_group({{"params": [torch.nn.Parameter(torch.ones(1))]}})
            for _ in range(3):
                optimizer.step()
                scheduler.step()
            optimizer.load_state_dict(optimizer.state_dict())
            results.append(read(optimizer))
            optimizer.zero_grad()
            assert optimizer.param_groups[0]["params"][0].grad is None
            assert torch.is_grad_enabled()
        return results
    ours = train()
    assert not is_loaded()
    load_compiler()
    assert "__dynamo_disable" not in vars(torch.optim.Optimizer.zero_grad.__wrapped__)
    assert train() == ours
    assert "__dynamo_disable" in vars(torch.optim.Optimizer.zero_grad.__wrapped__)
    print(len(ours))
    """
    assert _run(code).split() == [str(len(KINDS))]


def test_an_update_that_is_differentiable_stays_so():
    code = """
    defer_compiler()
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.1, differentiable=True)
    q = p.clone()
    optimizer.param_groups[0]["params"] = [q]
    q.grad = (2 * p).sum() * torch.ones(1)
    optimizer.step()
    print(is_loaded(), q.requires_grad, torch.autograd.grad(q.sum(), p)[0].item())
    """
    loaded, differentiable, gradient = _run(code).split()
    assert (loaded, differentiable) == ("False", "True")
    assert float(gradient) == pytest.approx(1 - 0.1 * 2)


def test_hooks_of_an_optimizer_run_as_before():
    code = """
    defer_compiler()
    optimizer = make(torch.optim.SGD)
    optimizer.register_step_pre_hook(lambda *_: print("pre"))
    optimizer.register_step_post_hook(lambda *_: print("post"))
    optimizer.step()
    """
    assert _run(code).split() == ["pre", "post"]


def test_a_model_compiles_after_the_compiler_was_deferred():
    code = """
    defer_compiler()
    optimizer = make(torch.optim.SGD)
    optimizer.step()
    model = torch.compile(torch.nn.Linear(2, 1), backend="eager")
    model(torch.ones(1, 2)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    print(is_loaded(), *read(optimizer))
    """
    loaded, *values = _run(code).split()
    assert loaded == "True"
    assert list(map(float, values)) == pytest.approx([0.9, -2.6])


def test_a_compiler_that_is_already_loaded_is_left_alone():
    code = """
    load_compiler()
    finders = list(sys.meta_path)
    defer_compiler()
    print(sys.meta_path == finders)
    """
    assert _run(code).strip() == "True"


def test_what_an_engine_preloads_and_its_first_step_need_no_compiler():
    """Nor sympy, which takes another half second: torch loads it for a backward pass from a given gradient."""
    code = """
    from dtkit.engine.warmup import preload
    preload()
    from dtkit.strategies.replicated import _run_backward_from
    x = torch.ones(2, requires_grad=True)
    _run_backward_from((3 * x).sum(), torch.tensor(0.5))
    print(is_loaded(), "sympy" in sys.modules, x.grad.tolist())
    """
    assert _run(code).split() == ["False", "False", "[1.5,", "1.5]"]
