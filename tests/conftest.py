"""What every test relies on: the same numbers each time, and two cores that are not fought over."""

from __future__ import annotations

import matplotlib
import torch
from hypothesis import settings

matplotlib.use("Agg")  # figures are drawn into files; no test opens a window
torch.set_num_threads(1)  # the tests themselves run side by side
settings.register_profile("house", deadline=None, derandomize=True)  # a red test is red for everybody
settings.load_profile("house")
