"""JAX's primitives and their traits: one row for those that are alike.

A primitive that is in no row is of the kind FLOAT32, and has no traits.
"""

import enum
import math
from typing import Any


class Kind(enum.Enum):
    """How `autocast` treats a primitive; the table below says why."""

    PRODUCT = enum.auto()
    BOUNDED = enum.auto()
    ARITHMETIC = enum.auto()
    MOVE = enum.auto()
    SPREAD = enum.auto()
    FLOAT32 = enum.auto()
    CALL = enum.auto()
    LOOP = enum.auto()
    BRANCH = enum.auto()
    DEVICES = enum.auto()


class Trait(enum.Flag):
    """A property of a primitive.

    Attributes:
      ELEMENTWISE: It works element by element; operands have the shape of the result.
      CHEAP: The backward pass may run it again, rather than read its result.
      KEEPS: It returns the elements of its operand, in other places or several times.
      PARALLEL: Each result is of the operand in its place.
      PLUS, MINUS, TIMES, OVER: It is the sum, the difference, the product or the
        quotient of its operands.
      SUM: It adds up, so its results are exact where they are subnormal.
      POWER: It is a power or a root.
      REWRITTEN: Compilers rewrite it together with the next operation, which rounds
        differently: x * y + z, x / y / z, 1 / sqrt(x), exp(x) * exp(y) and the like.
      POLE: It has poles, or ends of its domain.
      ORDER: It says which of two numbers is larger.
      EQUAL: It says whether two numbers are equal.
      PLACE: Its last result has places along an axis.
      COLLECTIVE: Devices exchange arrays.
      OPAQUE: It cannot run in another dtype, or has effects that must not happen twice.
      BITS: Its results depend on the bits of a dtype.
      RANDOM: Its results are random.
    """

    ELEMENTWISE = enum.auto()
    CHEAP = enum.auto()
    KEEPS = enum.auto()
    PARALLEL = enum.auto()
    PLUS = enum.auto()
    MINUS = enum.auto()
    TIMES = enum.auto()
    OVER = enum.auto()
    SUM = enum.auto()
    POWER = enum.auto()
    REWRITTEN = enum.auto()
    POLE = enum.auto()
    ORDER = enum.auto()
    EQUAL = enum.auto()
    PLACE = enum.auto()
    COLLECTIVE = enum.auto()
    OPAQUE = enum.auto()
    BITS = enum.auto()
    RANDOM = enum.auto()


NONE = Trait(0)
SIMPLE = Trait.ELEMENTWISE | Trait.CHEAP
TABLE = [
    # Nearly all the work, at which the hardware is fast: in half precision.
    (Kind.PRODUCT, NONE, "conv_general_dilated dot_general ragged_dot_general"),
    # Computed in float32, since log(1 - sigmoid(x)) needs all digits. But the result is
    # small and harmless, so silu(x) is in half precision where x is.
    (Kind.BOUNDED, SIMPLE, "cos erf logistic sign sin tanh"),
    # They round once, and stay near their operands: as wide as those.
    (Kind.ARITHMETIC, SIMPLE | Trait.SUM | Trait.PLUS, "add"),
    (Kind.ARITHMETIC, SIMPLE | Trait.SUM, "add_any"),  # of gradients: in no layer
    (Kind.ARITHMETIC, SIMPLE | Trait.SUM | Trait.MINUS, "sub"),
    (Kind.ARITHMETIC, SIMPLE | Trait.REWRITTEN | Trait.TIMES, "mul"),
    (Kind.ARITHMETIC, SIMPLE | Trait.REWRITTEN | Trait.POLE | Trait.OVER, "div"),
    # They round nothing: as wide as their operands.
    (Kind.MOVE, SIMPLE, "abs clamp max min neg select_n"),
    (Kind.MOVE, Trait.KEEPS | SIMPLE, "copy stop_gradient"),
    (Kind.MOVE, Trait.KEEPS | Trait.CHEAP, "reshape squeeze transpose"),
    (Kind.MOVE, Trait.KEEPS, """
        layout_constraint name relayout reshard rev sharding_constraint
        with_memory_space_constraint"""),
    (Kind.MOVE, Trait.KEEPS | Trait.PARALLEL, "device_put optimization_barrier"),
    (Kind.MOVE, NONE, """
        concatenate dynamic_slice dynamic_update_slice pad slice split stack
        unstack"""),
    (Kind.MOVE, Trait.COLLECTIVE, "all_to_all ppermute"),
    # Also moves, but an element may go to several places, so their derivatives are
    # sums. They run in float32 between two casts, so that these sums are float32.
    (Kind.SPREAD, Trait.KEEPS | Trait.CHEAP, "broadcast_in_dim broadcast_to tile"),
    (Kind.SPREAD, Trait.KEEPS, """
        pbroadcast preduced pvary reduced_vary_cast reduced_vary_cast_p"""),
    (Kind.SPREAD, NONE, """
        cummax cummin gather reduce_max reduce_min reduce_window_max reduce_window_min
        scatter select_and_gather_add"""),
    (Kind.SPREAD, Trait.PARALLEL, "sort"),
    (Kind.SPREAD, Trait.PLACE, "approx_top_k top_k"),
    (Kind.SPREAD, Trait.COLLECTIVE, """
        all_gather all_gather_invariant all_gather_reduced pmax pmin"""),
    # All others compute in float32, because they leave the range of half precision, add
    # up its rounding, or nobody knows. Sums and products of many elements:
    (Kind.FLOAT32, Trait.SUM, """
        cumsum reduce_sum reduce_window_sum scatter-add scatter-sub
        select_and_scatter_add"""),
    (Kind.FLOAT32, Trait.SUM | Trait.COLLECTIVE, """
        psum psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter"""),
    (Kind.FLOAT32, NONE, """
        cumlogsumexp cumprod reduce reduce_prod reduce_window scatter-max scatter-min
        scatter-mul select_and_scatter"""),
    # Powers, exponentials, logarithms and roots. exp is not CHEAP: several kernels of
    # the backward pass of a softmax would each run all that leads to it.
    (Kind.FLOAT32, SIMPLE | Trait.REWRITTEN | Trait.POWER, "square"),
    (Kind.FLOAT32, SIMPLE | Trait.REWRITTEN | Trait.POWER | Trait.POLE, """
        integer_pow pow rsqrt sqrt"""),
    (Kind.FLOAT32, SIMPLE | Trait.REWRITTEN | Trait.POLE, "log"),
    (Kind.FLOAT32, SIMPLE | Trait.POLE, "log1p log2"),
    (Kind.FLOAT32, SIMPLE, "convert_element_type erfc one_minus_square"),
    (Kind.FLOAT32, Trait.ELEMENTWISE | Trait.REWRITTEN, "exp exp2"),
    (Kind.FLOAT32, Trait.ELEMENTWISE | Trait.POLE, "acos acosh asin atanh erf_inv rem"),
    (Kind.FLOAT32, Trait.ELEMENTWISE, """
        asinh atan atan2 bessel_i0e bessel_i1e cbrt ceil complex conj cosh digamma expm1
        floor igamma igamma_grad_a igammac imag lgamma polygamma polynomial real
        reduce_precision regularized_incomplete_beta round sinh tan zeta"""),
    (Kind.FLOAT32, Trait.ELEMENTWISE | Trait.BITS, "nextafter"),
    (Kind.FLOAT32, Trait.BITS, "bitcast_convert_type"),
    (Kind.FLOAT32, Trait.BITS | Trait.RANDOM, "rng_uniform"),
    # Decisions, whose results are integers and flags.
    (Kind.FLOAT32, Trait.ELEMENTWISE | Trait.ORDER, "ge gt le lt"),
    (Kind.FLOAT32, Trait.ELEMENTWISE | Trait.EQUAL, "eq ne"),
    (Kind.FLOAT32, Trait.ELEMENTWISE, "eq_to is_finite le_to lt_to"),
    (Kind.FLOAT32, Trait.PLACE, "argmax argmin"),
    # Integers, flags, random keys, and arrays out of nothing.
    (Kind.FLOAT32, Trait.ELEMENTWISE, """
        and clz mulhi not or population_count shift_left shift_right_arithmetic
        shift_right_logical xor"""),
    (Kind.FLOAT32, NONE, """
        after_all axis_index create_token dim_as_value dimension_size empty empty2
        from_edtype iota iota_2x32_shape lu_pivots_to_permutation platform_index
        random_clone random_fold_in random_seed random_split random_unwrap random_wrap
        reduce_and reduce_or reduce_xor shape_assertion to_edtype zeros_like"""),
    (Kind.FLOAT32, Trait.RANDOM, """
        philox2x32 philox4x32 random_bits random_gamma rng_bit_generator threefry2x32
        threefry4x32"""),
    # Solvers, decompositions, transforms.
    (Kind.FLOAT32, NONE, """
        cholesky cholesky_update custom_linear_solve eig eigh eigh_jacobi fft geqp3
        geqrf hessenberg householder_product lu ormqr qr schur svd symmetric_product
        triangular_solve tridiagonal tridiagonal_solve"""),
    # Kernels, callbacks, and products that choose dtypes by themselves.
    (Kind.FLOAT32, Trait.OPAQUE, """
        custom_partitioning debug_callback debug_print ffi_call io_callback pallas_call
        pure_callback tpu_custom_call triton_kernel_call"""),
    (Kind.FLOAT32, NONE, """
        bias_bwd bias_fwd cudnn_fusion dot_product_attention_bwd
        dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
        dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
        dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd
        dot_product_attention_fwd_wrapper scaled_dot scaled_matmul
        scaled_matmul_wrapper"""),
    # Calls that nobody opens: they have rules of their own, or run elsewhere.
    (Kind.FLOAT32, NONE, """
        call call_exported call_hi_primitive call_hi_primitive_linearized check
        composite core_map create_linear custom_jvp_call_jaxpr custom_lin
        custom_transpose_call custom_vmap_call linear_call remat_opt run_state stage
        vmap xla_pmap"""),
    # References, logs and other effects; exchanges that are not awaited.
    (Kind.FLOAT32, NONE, """
        accum_grad_in_ref addupdate box_get box_set dce_sink empty_ref free_ref freeze
        get inspect_sharding log_extend log_read new_box new_log new_ref pin swap tie
        unpin unreachable"""),
    (Kind.FLOAT32, Trait.COLLECTIVE, """
        all_gather_done all_gather_reduced_start all_gather_start all_to_all_done
        all_to_all_start full_to_shard global_array_to_host_local_array
        host_local_array_to_global_array pbroadcast_done pbroadcast_dynamic
        pbroadcast_start pgather ppermute_done ppermute_start precv psend psum_done
        psum_invariant_start psum_start ragged_all_to_all reduce_scatter_done
        reduce_scatter_start shard_to_full unreduced_pmax unreduced_pmin
        unreduced_psum_start unreduced_reduce_scatter_start vary_unreduced_cast
        vary_unreduced_cast_p"""),
    # They hold programs, which follow the same table. `autocast` opens calls, and so
    # drops a derivative rule that belongs to the primitive itself: those with such a
    # rule need a method in `evaluate.NESTED`, as the custom ones have.
    (Kind.CALL, NONE, """
        closed_call custom_jvp_call custom_vjp_call eval_jaxpr jit program_order
        remat2"""),
    # A new loop also needs its bodies in `flow.bodies_of`, with a function that runs it
    # again; a method in `evaluate.NESTED`; its state in `ends.Walk.of`; and a function
    # in `bodies.BODIES` of the trace. `tape._iterations` and `Program.repeats` name
    # `scan` because its length is known, and because it saves in each iteration.
    (Kind.LOOP, NONE, "scan while"),
    (Kind.BRANCH, NONE, "cond"),
    (Kind.DEVICES, NONE, "shard_map"),
]  # fmt: skip
# Of the powers whose exponents are no operands or parameters.
EXPONENTS = {"square": 2, "sqrt": 1 / 2, "rsqrt": -1 / 2}
_ROWS = {name: row[:2] for row in TABLE for name in row[2].split()}


def table_name(primitive: Any, types: Any, params: Any) -> str:
    """Returns the name that the table has for a primitive.

    It is the primitive's own, but "mul" for a `dot_general` that adds up nothing, as
    `jnp.einsum("...k,k->...k", x, gain)`: it multiplies, as `x * gain` does.

    Args:
      primitive: The primitive.
      types: The types of its operands.
      params: Its parameters.
    """
    if primitive.name == "dot_general":
        (axes, _), _ = params["dimension_numbers"]
        if math.prod(types[0].shape[x] for x in axes) == 1:
            return "mul"
    return primitive.name


def kind_of(name: str) -> Kind:
    """Returns the kind of a primitive."""
    return _ROWS.get(name, (Kind.FLOAT32, NONE))[0]


def has(name: str, trait: Trait) -> bool:
    """Whether a primitive has a trait, or one of several."""
    return bool(_ROWS.get(name, (Kind.FLOAT32, NONE))[1] & trait)


def names_of(wanted: Kind | Trait) -> frozenset[str]:
    """Returns the primitives of a kind, or those with a trait, or one of several."""
    rows = _ROWS.items()
    if isinstance(wanted, Kind):
        return frozenset(name for name, (kind, _) in rows if kind == wanted)
    return frozenset(name for name, (_, traits) in rows if traits & wanted)
