"""Other libraries: all that depends on their names, in one place.

Any of them may be missing. Flax nnx, whose modules change in place, has `_nnx` besides.
"""

# A line of these packages is not the user's: the line that called them is, where the
# dtype of a layer is chosen. Of other libraries both lines are named.
FRAMEWORKS = (
    "jax", "jaxlib", "flax", "haiku", "equinox", "keras", "optax", "chex", "jmp",
    "einops", "optree", "optax_lossscale",
)  # fmt: skip
# The classes of models whose Python numbers are settings, which no step trains.
SETTINGS = (("equinox", "Module"),)
# Functions that users pass as `transform=` and that average no gradients. Any other
# function may average, so that nothing warns.
TRANSFORMS = (
    ("jax", "value_and_grad"),
    ("flax.nnx", "value_and_grad"),
    ("equinox", "filter_value_and_grad"),
    ("haiku", "value_and_grad"),
)
