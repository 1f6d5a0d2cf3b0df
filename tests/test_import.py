"""To import the tests is quick, since nobody wants to wait for the first one."""


def test_compiles_nothing(compiled_at_import):
    text = "Make constants of test modules with NumPy, or in a function"
    assert compiled_at_import == [], text
