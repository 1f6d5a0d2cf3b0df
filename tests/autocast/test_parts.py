"""What JAX does not document is in one file, so that the next JAX breaks no other."""

import re

from helpers import ROOT

UNDOCUMENTED = re.compile(
    r"_src\b|source_info|name_stack|trace_to_jaxpr|UnspecifiedValue|Effect\"|_internal|"
    r"inner_aval|get_bind_params|ft_in|\.(effects|ctx|vma|manual_axis_type)\b|"
    r"aval\.update|debug_info|_jit_info|\"_trace\"|"
    r"hasattr\(\w+, \"(val|eqns|jaxpr|consts)\""
)


def test_only_one_file_reads_what_jax_does_not_document():
    files = (ROOT / "optax_lossscale").rglob("*.py")
    found = {x.name for x in files if UNDOCUMENTED.search(x.read_text())}
    assert found == {"parts.py"}
