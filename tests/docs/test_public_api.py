"""No public name, parameter, default, field or state changes unnoticed."""

from public_api import PATH, public_api


def test_public_api_is_as_recorded():
    """A change on purpose: run `python tests/support/public_api.py`."""
    assert public_api() == PATH.read_text()
