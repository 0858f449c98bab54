"""Inner outputs of transformers' models in a process that has only unpickled them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import default_collate

from dtkit.rpc import pickling

pytest.importorskip("transformers")
from transformers.utils import output_capturing

from tests.support.hugging_face import make_llama, make_mixtral, make_samples


def test_unpickled_mixture_of_experts_returns_the_loss_of_its_routers(monkeypatch: pytest.MonkeyPatch):
    model, batch = make_mixtral(), default_collate(make_samples(4, "mixtral"))
    data = pickling.dumps(model)
    expected = model(**batch)
    empty = type(output_capturing._CAN_RECORD_REGISTRY)()  # as in a new kernel or engine
    monkeypatch.setattr(output_capturing, "_CAN_RECORD_REGISTRY", empty)
    # unpickles: the model of this test
    output = pickling.loads(data)(**batch)
    assert torch.equal(output.aux_loss, expected.aux_loss)
    assert torch.equal(output.loss, expected.loss)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_model_that_has_returned_inner_outputs_can_be_sent(name: str):
    model = {"llama": make_llama, "mixtral": make_mixtral}[name]()
    batch = default_collate(make_samples(4, name))
    expected = model(**batch, output_hidden_states=True)
    # unpickles: the model of this test
    output = pickling.loads(pickling.dumps(model))(**batch, output_hidden_states=True)
    assert len(output.hidden_states) == len(expected.hidden_states) > 0
    assert torch.equal(output.hidden_states[-1], expected.hidden_states[-1])
