"""Rules that scale by squares, over a small layout, and pushes at random places."""

import json

import torch

from pscore.model.layout import Span
from psservice.model.training_mode import TrainingMode
from tests.psservice.service_makers import F32, layout_of

LAYOUT = layout_of(((30, 20), F32), (7, F32), ((200, 4), F32))
SIZE = LAYOUT.size


def said(name, groups=None, **options):
    """The method settings of a rule that is named after an optimizer of torch's."""
    found = {"update": name.lower(), "optimizer": json.dumps({"name": name, "options": options})}
    return found | ({"groups": json.dumps(groups)} if groups is not None else {})


def rule_of(method_settings, theta, span=None):
    return TrainingMode.of(method_settings).rule(LAYOUT, span or Span(0, SIZE), theta)


def random(seed, count=SIZE):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))
