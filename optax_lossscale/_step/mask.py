"""Which leaves are gradients, and which are new values of the parameters."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import optax

MaskLike = Any | Callable[[Any], Any] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """A tree of bools, a prefix of one, a function that makes one, or None: all True.

    Attributes:
      spec: The mask as the user passes it, in the form that `optax.masked` takes.
    """

    spec: MaskLike = None

    def __post_init__(self):
        if self._function is None:
            _check_bools(self.spec)

    @property
    def _function(self) -> Callable[[Any], Any] | None:
        # An Equinox model of bools may be callable, but is a tree, not a function.
        leaves = jax.tree.leaves(self.spec)
        is_function = callable(self.spec) and leaves and all(map(callable, leaves))
        return self.spec if is_function else None

    @property
    def _key(self) -> Hashable:
        leaves, treedef = jax.tree.flatten(self.spec)
        return *leaves, treedef

    def __eq__(self, other):
        return isinstance(other, Mask) and self._key == other._key

    def __hash__(self):
        return hash(self._key)

    def __repr__(self):
        return repr(self.spec)

    def _prefix(self, tree):
        function = self._function
        return self.spec if function is None else _check_bools(function(tree))

    def expand(self, tree: Any) -> Any:
        """Returns the mask with a leaf for each leaf of the tree.

        Raises:
          ValueError: If the mask is not a prefix of the tree.
        """
        if self.spec is None:
            return jax.tree.map(lambda _: True, tree)
        prefix = self._prefix(tree)
        try:
            return jax.tree.map(
                lambda keep, part: jax.tree.map(lambda _: keep, part), prefix, tree
            )
        except ValueError as error:
            raise ValueError(
                f"mask must be a prefix of the tree that it masks, and {prefix!r} is "
                f"not a prefix of {jax.tree.structure(tree)}. To mask trees of several "
                "structures, pass a function."
            ) from error

    def partition(self, tree: Any) -> Any:
        """Returns the tree with None for the leaves that are not gradients."""
        if self.spec is None:
            return tree
        keep = self.expand(tree)
        return jax.tree.map(lambda keep, x: x if keep else None, keep, tree)

    def combine(self, gradients: Any, values: Any) -> Any:
        """Takes the leaves that are gradients from one tree, the others from another.

        Args:
          gradients: A whole tree, whose gradients are taken.
          values: The other tree, of the same structure.
        """
        if self.spec is None:
            return gradients
        keep = self.expand(gradients)
        return jax.tree.map(lambda k, g, v: g if k else v, keep, gradients, values)

    def complete(self, proposed: Any, params: Any) -> Any:
        """Fills in the parameters that the inner optimizer does not see.

        Args:
          proposed: Parameters as the inner optimizer sees them: with
            `optax.MaskedNode`.
          params: All the parameters.
        """
        if self.spec is None:
            return proposed
        # Not expanded: a subtree masked as a whole has a single MaskedNode.
        return jax.tree.map(
            lambda k, new, old: new if k else old,
            self._prefix(params),
            proposed,
            params,
        )

    def wrap(
        self, inner: optax.GradientTransformationExtraArgs
    ) -> optax.GradientTransformationExtraArgs:
        """Returns an optimizer that sees only the gradients."""
        if self.spec is None:
            return inner
        return optax.masked(inner, self.spec, mask_compatible_extra_args=True)

    def check_params(self, params: Any) -> None:
        """Raises if `update` lacks the old values that a skipped step returns."""
        if self.spec is not None and params is None:
            raise ValueError(
                "With a mask update needs params: a skipped step returns the old "
                "values of the parameters without gradients."
            )


def _check_bools(tree: Any) -> Any:
    """Returns `tree`, if all its leaves are True or False."""
    wrong = [x for x in jax.tree.leaves(tree) if not isinstance(x, bool)]
    if wrong:
        raise TypeError(
            "mask must be a tree of True and False, a prefix of the parameters, or a "
            f"function that makes one of them, got a leaf {wrong[0]!r}."
        )
    return tree
