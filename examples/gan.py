"""Train a GAN in one ONNX file: two alternating training steps, on scikit-learn's digits.

    python examples/gan.py

The inference graph holds both networks. The step `discriminator` learns to tell real digits from
generated ones. It runs twice for each run of the step `generator`. Writes the training model,
out/gan.onnx, and generated digits, out/samples.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import onward
import onward.engines

OUT = Path(__file__).parent / "out"
LATENT, SIZE = 16, 8


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(LATENT, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, SIZE * SIZE), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(SIZE * SIZE, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
        )

    def forward(self, z: torch.Tensor, digit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generated = self.generator(z)
        return generated, self.discriminator(generated), self.discriminator(digit)


def exported() -> onward.Model:
    """Return both networks as one ONNX model."""
    torch.manual_seed(0)
    examples = (torch.zeros(2, LATENT), torch.zeros(2, SIZE * SIZE))
    program = torch.onnx.export(
        Gan().eval(),
        examples,
        input_names=["z", "digit"],
        output_names=["generated", "score_of_generated", "score_of_digit"],
        dynamic_shapes=({0: "batch"}, {0: "batch"}),
        verbose=False,
    )
    assert program is not None
    return onward.load(program.model_proto)


def prepared(model: onward.Model, rate: float = 5e-4) -> onward.Model:
    """Return the training model, with a step for each network."""
    adam = f"adam:lr={rate},beta1=0.5"
    model = onward.prepare(
        model,
        loss=["score_of_generated=bce_with_logits:constant=0", "score_of_digit=bce_with_logits:constant=1"],
        trainable="discriminator.*",
        optimizer=adam,
        name="discriminator",
        times=2,
    )
    return onward.prepare(
        model,
        loss="score_of_generated=bce_with_logits:constant=1",
        trainable="generator.*",
        optimizer=adam,
        name="generator",
        append=True,
    )


def digits() -> dict[str, np.ndarray]:
    """Return images of digits with pixels from -1 to 1, the range of the generator."""
    return {"digit": (load_digits().data / 8 - 1).astype(np.float32)}


def samples(model: onward.Model, count: int) -> np.ndarray:
    """Return images from the generator."""
    z = np.random.default_rng(0).standard_normal((count, LATENT), np.float32)
    generate = onward.engines.function(
        onward.transform.extract(model, inputs=["z"], outputs=["generated"]), engine="onnxruntime"
    )
    return generate({"z": z})["generated"].reshape(-1, SIZE, SIZE)


def sheet(images: np.ndarray, columns: int = 12, scale: int = 6) -> np.ndarray:
    """Return images side by side, as one image of bytes."""
    bordered = np.pad(images, [(0, 0), (1, 1), (1, 1)], constant_values=-1)
    rows = [np.hstack(list(bordered[i : i + columns])) for i in range(0, len(bordered), columns)]
    return (127.5 * (1 + np.vstack(rows))).astype(np.uint8).repeat(scale, 0).repeat(scale, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=400, help="epochs to train (default: 400)")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    gan = prepared(exported())
    gan.save(OUT / "gan.onnx")
    run = onward.train(OUT / "gan.onnx", digits(), noise={"z": "normal"}, epochs=args.epochs, batch_size=64)
    from PIL import Image

    Image.fromarray(sheet(samples(run.load_last(), 48))).save(OUT / "samples.png")
    print(f"wrote {OUT / 'samples.png'}: generated digits")


if __name__ == "__main__":
    main()
