"""Metrics of torchmetrics in a module; `make proof-doors` has them installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure import CheckpointManager

if importlib.util.find_spec("torchmetrics") is None:
    pytest.skip("torchmetrics is not installed; make proof-doors has it", allow_module_level=True)


class Measured(torch.nn.Module):
    metrics: Any

    def __init__(self) -> None:
        import torchmetrics as library

        super().__init__()
        of_classes: Any = {"task": "multiclass", "num_classes": 3}
        self.inner = torch.nn.Linear(4, 3)
        self.reset_often = library.Accuracy(**of_classes)
        self.metrics = torch.nn.ModuleList(
            [
                library.AUROC(**of_classes),  # these two keep all that they see, in lists
                library.AveragePrecision(**of_classes),
                library.ConfusionMatrix(**of_classes),
                library.MetricCollection(
                    [library.Precision(**of_classes), library.Recall(**of_classes)]
                ),
            ]
        )
        self.best = library.MaxMetric()
        # As many programs keep them, which register no module then.
        self.listed = {"recent": [library.Accuracy(**of_classes)]}
        self.recent = library.wrappers.Running(library.MeanMetric(), 3)
        self.range = library.MinMaxMetric(library.Accuracy(**of_classes))

    def measure(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        scores = self.inner(x).softmax(-1)
        seen = scores.detach()
        for metric in (self.reset_often, *self.metrics):
            metric.update(seen, classes)
        self.best.update(self.reset_often.compute())
        self.listed["recent"][0].update(seen, classes)
        self.recent.update(seen.square().mean())
        self.range(seen, classes)
        return torch.nn.functional.nll_loss(scores.log(), classes)


@pytest.mark.parametrize("stop", [1, 5, 7])
def test_what_a_metric_has_added_up_comes_back(tmp_path: Path, stop: int) -> None:
    def trained(directory: Path, end: int) -> list[str]:
        torch.manual_seed(0)
        model = Measured()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        state = {"model": model, "optimizer": optimizer}
        with CheckpointManager(directory, recipe={}) as manager:
            for step in range(manager.restore_or_initialize(state).step, end):
                if step % 4 == 0:
                    model.reset_often.reset()
                optimizer.zero_grad()
                model.measure(torch.randn(32, 4), torch.randint(3, (32,))).backward()
                optimizer.step()
                manager.save(step + 1, state)
        held = *model.metrics, *model.listed["recent"], model.recent, model.range
        return [str(each.compute()) for each in (model.reset_often, model.best, *held)]

    whole = trained(tmp_path / "whole", 9)
    assert trained(tmp_path / "run", stop) != whole
    assert trained(tmp_path / "run", 9) == whole
