"""Script that makes steps of a SavedModel. It imports nothing of Onward.

python trial_script.py FOLDER BATCH RESULTS
"""

from __future__ import annotations

import json
import sys

import numpy as np
import tensorflow as tf


def main(folder: str, batch: str, results: str) -> None:
    module = tf.saved_model.load(folder)
    with np.load(batch) as arrays:
        settings = json.loads(str(arrays["settings"]))
        batch_arrays = [arrays[str(i)] for i in range(len(settings["names"]))]
    losses = [float(module.train_step(*batch_arrays)["loss"]) for _ in range(settings["steps"])]
    np.savez(results, losses=losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
