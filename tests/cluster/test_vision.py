"""Models of torchvision and timm, where both are installed (the extra `vision`): exact under every strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.tried import vision

if TYPE_CHECKING:
    import dtkit

pytest.importorskip("torchvision")
pytest.importorskip("timm")
pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MODELS = {name: make for name, (make, is_same_on_two) in vision.list_models().items() if is_same_on_two}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", vision.PAIRS, ids=lambda strategy: type(strategy).__name__)
def test_model_trains_as_in_a_plain_loop(cluster2: dtkit.Cluster, name: str, strategy: dtkit.DataParallel):
    result = vision.compare(cluster2, MODELS[name], strategy)
    assert "WRONG" not in result
    assert "refused" not in result or (name, type(strategy).__name__) == ("timm convnext_atto", "TensorParallel")
