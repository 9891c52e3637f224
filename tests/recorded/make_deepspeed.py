"""Makes the checkpoints of DeepSpeed in this folder, on two processes of this machine: `python make_deepspeed.py`.

Beside each is `merged.npz`: what DeepSpeed's own tools put together of it, as `parameter:fp32`, `parameter:exp_avg` ...
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent / "deepspeed"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
TAG = "global_step5"

from deepspeed_runs import configured, run  # noqa: E402


def universal(made: Path, place: Path) -> Path:
    """The universal checkpoint that DeepSpeed makes of another."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
               "--input_folder", str(made / TAG), "--output_folder", str(place / TAG),
               "--num_extract_workers", "1", "--num_merge_workers", "1"]  # fmt: skip
    place.mkdir()
    subprocess.run(command, check=True)
    return place


def merged(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    found = {}
    for name in names:
        for slot in ("fp32", "exp_avg", "exp_avg_sq"):
            tree = torch.load(folder / TAG / "zero" / name / f"{slot}.pt", weights_only=False)
            found[f"{name}:{slot}"] = (tree["param"] if isinstance(tree, dict) else tree).detach().numpy()
    return found


def make(name: str, stage: int, kind: str) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / "made"
        run(made, 2, configured(stage, kind), tag=TAG)
        if stage:
            whole = get_fp32_state_dict_from_zero_checkpoint(str(made))
            assert all(isinstance(tensor, torch.Tensor) for tensor in whole.values())
            other = universal(made, Path(place) / "universal")
            names = sorted(each.parent.name for each in (other / TAG / "zero").glob("*/exp_avg.pt"))
            np.savez_compressed(made / "merged.npz", **merged(other, names))
            if name == "zero2":
                _keep(other, "universal")
        for extra in ("zero_to_fp32.py", "zero_to_torch.py", "losses.json"):
            (made / extra).unlink(missing_ok=True)
        _keep(made, name)


def _keep(made: Path, name: str) -> None:
    shutil.rmtree(HERE / name, ignore_errors=True)
    shutil.copytree(made, HERE / name)


if __name__ == "__main__":
    make("zero0", 0, "bf16")
    make("zero1", 1, "fp32")
    make("zero2", 2, "bf16")
    make("zero3", 3, "bf16")
