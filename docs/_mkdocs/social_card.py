"""Draws the picture that other sites show with a link to the documentation."""

from pathlib import Path

import matplotlib.pyplot as plt

figure = plt.figure(figsize=(12, 6.3), dpi=100, facecolor="#4051b5")
for y, size, text in (
    (0.70, 64, "optax_lossscale"),
    (0.54, 32, "Mixed precision for JAX and Optax"),
):
    figure.text(0.075, y, text, size=size, color="white", family="DejaVu Sans")
figure.text(
    0.075, 0.26, "optimizer = LossScaleOptimizer(optax.adam(1e-3))",
    size=25, color="white", family="DejaVu Sans Mono",
    bbox={"facecolor": "#2c387e", "edgecolor": "none", "pad": 22},
)  # fmt: skip
figure.savefig(Path(__file__).parents[1] / "social-card.png")
